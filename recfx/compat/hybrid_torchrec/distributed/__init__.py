"""As ``hybrid_torchrec.distributed``."""
