"""Other products' names on recfx, so that code written for them runs with its imports changed."""
