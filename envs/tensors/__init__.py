"""Environments on the device: thousands of rows whose observations, rewards and ends are tensors on one device.

Such an environment is a ``gymnasium.vector.VectorEnv`` that is made with ``num_envs`` and ``device`` and whose
``reset`` and ``step`` speak tensors. :class:`~sfactory.envs.tensors.group.TensorGroup` steps it for a learner on the
same device, and nothing passes through the host. Two environments of this kind are here: ``sfactory/TensorCartPole``
and ``sfactory/TensorMemoryGrid``.
"""
