"""Exported inference: from a converted model to a file that a server loads without Python, and back.

The package's name is not ``export``, because the function of that name is public.
"""
