"""Convolutions of images on the CPU."""
