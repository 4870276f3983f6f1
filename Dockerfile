# docker build -t sfactory .                                     trains on the CPU
# docker build -t sfactory:cuda --build-arg TORCH=cu130 .        trains on an NVIDIA GPU: docker run --gpus all
# docker run --rm -v "$PWD/runs:/work/runs" sfactory train --env CartPole-v1
# ViZDoom keeps its screens in /dev/shm: with many of them, --shm-size 1g

FROM python:3.12-slim-bookworm AS build
# TORCH: cpu, or the CUDA version of torch's wheels. EXTRAS: see pyproject.toml.
ARG TORCH=cpu
ARG EXTRAS=atari,mujoco,box2d,minigrid,video
# faster-fifo and Box2D are compiled where there is no wheel of them. Debian keeps one version of a package.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ swig \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN python -m venv /opt/sfactory
ENV PATH=/opt/sfactory/bin:$PATH
COPY constraints.txt ./
# constraints.txt pins torch.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir -c constraints.txt --index-url "https://download.pytorch.org/whl/${TORCH}" torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY sfactory sfactory
COPY envs envs
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[${EXTRAS}]"

FROM python:3.12-slim-bookworm
ARG TORCH=cpu
# What OpenCV and MuJoCo's renderer load; for a GPU also the compiler with which Triton makes what launches its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libegl1 libgl1 libglib2.0-0 \
    && if [ "$TORCH" != cpu ]; then apt-get install -y --no-install-recommends gcc libc6-dev; fi \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 sfactory \
    && install -d -o sfactory /work
COPY --from=build /opt/sfactory /opt/sfactory
# Compiled kernels are kept here: the packages belong to root.
ENV PATH=/opt/sfactory/bin:$PATH \
    MUJOCO_GL=egl \
    NUMBA_CACHE_DIR=/home/sfactory/.cache/numba
USER 1000
WORKDIR /work
ENTRYPOINT ["sfactory"]
CMD ["--help"]
