"""The counterpart of ``hybrid_torchrec.distributed``."""
