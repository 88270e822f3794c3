"""The names of other products on top of recfx, so that code written for them runs once its imports are changed."""
