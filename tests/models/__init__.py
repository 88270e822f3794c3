"""The zoo: models to convert, each with a way to call it. See ``ZOO``."""

from tests.models.case import Case
from tests.models.handwritten import HANDWRITTEN
from tests.models.managed import MANAGED
from tests.models.refused import REFUSED
from tests.models.sequences import SEQUENCES
from tests.models.torchrec_models import TORCHREC_MODELS
from tests.models.torchrec_test_models import TORCHREC_TEST_MODELS

ZOO: list[Case] = [*TORCHREC_MODELS, *TORCHREC_TEST_MODELS, *HANDWRITTEN, *SEQUENCES]

__all__ = ["MANAGED", "REFUSED", "SEQUENCES", "ZOO", "Case"]
