"""As ``hybrid_torchrec.modules``."""
