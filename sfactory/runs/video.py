"""MP4 files of episodes, one file each."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from sfactory.envs.rendering import has_display
from sfactory.errors import ConfigError, EnvironmentFault, installing


def prepare_rendering() -> None:
    """Let MuJoCo and SDL (pygame) render without a window where there is no display. MuJoCo's own default fails there;
    SDL prints an error that is none. To be called before the first environment is made, also one that is not rendered:
    DeepMind Control chooses when it is imported."""
    if not has_display():
        if _has_egl():
            os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")


def _has_egl() -> bool:
    """Whether there is the library without which what is told to render by it cannot even be imported."""
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        return False
    return True


def check_video() -> None:
    """Check that videos can be written.

    Raises:
        ConfigError: If imageio-ffmpeg or ffmpeg itself is not installed.
    """
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except ImportError as error:
        raise ConfigError(f"a video needs imageio-ffmpeg: {error}; {installing('video')}") from error
    except RuntimeError as error:
        raise ConfigError(f"a video needs ffmpeg: {error}") from error


class VideoRecorder:
    """Writes the frames of one environment, in order, to ``episode_000.mp4`` and so on.

    Args:
        folder: Made if it is not there. Videos of the same names are replaced.
        fps: Frames per second.

    Raises:
        ConfigError: If imageio-ffmpeg is not installed or the folder cannot be made.
    """

    def __init__(self, folder: Path, fps: float) -> None:
        check_video()
        import imageio_ffmpeg

        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot use the video folder {folder}: {error.strerror}; name another one with --video"
            ) from error
        # absolute, since an environment may change the working directory
        self._write_frames, self._folder, self._fps = imageio_ffmpeg.write_frames, folder.absolute(), fps
        self._episode = -1
        self._size: tuple[int, int] | None = None
        self._writer: Generator[None, Any, None] | None = None

    def begin_episode(self) -> None:
        """Finish the last file, if any; the next frame begins a new one."""
        self.close()
        self._episode += 1

    def add(self, image: Any) -> None:
        """Append a frame.

        Args:
            image: uint8 ``[H, W, 3]``.

        Raises:
            EnvironmentFault: If it is no such image, or not of the size of the episode's other ones.
        """
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            kind = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else repr(image)
            raise EnvironmentFault(
                f"render() returned {kind}; for a video (render_mode rgb_array) it must return uint8 [height, width, 3]"
            )
        size = image.shape[1], image.shape[0]
        # yuv420p, which every player reads, has one colour for 2 x 2 pixels: the last row or column of an odd size is
        # shown twice.
        image = np.pad(image, ((0, image.shape[0] % 2), (0, image.shape[1] % 2), (0, 0)), "edge")
        if self._writer is None:
            path, even = self._folder / f"episode_{self._episode:03d}.mp4", (image.shape[1], image.shape[0])
            path.unlink(missing_ok=True)  # else a link would be followed
            self._writer = self._write_frames(
                str(path), even, fps=self._fps, macro_block_size=2, ffmpeg_log_level="error"
            )
            self._writer.send(None)
            self._size = size
        if size != self._size:
            raise EnvironmentFault(
                f"render() returned an image of {size} pixels after one of {self._size}; they must be of one size"
            )
        self._writer.send(np.ascontiguousarray(image))

    def close(self) -> None:
        """Finish the last file. May be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
