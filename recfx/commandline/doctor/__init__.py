"""``python -m recfx doctor``: is this machine set up, are the kernels right on its device, and how fast are they.

The files about what is installed import no torch: they also work where torch, or CANN below it, cannot be imported.
"""
