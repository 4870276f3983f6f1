"""Convolutions of images on the CPU: by blocks of pixels, by oneDNN, and in bfloat16 with an image in the cache."""
