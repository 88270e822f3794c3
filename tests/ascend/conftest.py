"""Where processes of pytest-xdist keep for each other what takes long to make."""

import pytest

from tests.ascend import kept


@pytest.fixture(scope="session", autouse=True)
def _folder_of_the_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    if hasattr(request.config, "workerinput"):
        kept.FOLDER = tmp_path_factory.getbasetemp().parent / "kept"
        kept.FOLDER.mkdir(exist_ok=True)
