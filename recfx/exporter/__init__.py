"""Exported inference. The package's name is not ``export``, because the function of that name is public."""
