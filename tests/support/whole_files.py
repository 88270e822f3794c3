"""How files are handed to the processes of pytest-xdist: as ``--dist=loadfile`` does, and also if one of them ends.

pytest-xdist 3.8 gives the tests of a process that has ended to the next one, with the test that ended it and with files
of which nothing is left. It then waits for ever: for an answer to nothing, or with a single test, which no process
begins before it knows what comes next. The version after 3.8 may do without this.
"""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class WholeFiles(LoadFileScheduling):
    """A test that ends its process has failed; another process runs what is left of its files."""

    def remove_node(self, node: WorkerController) -> str | None:
        left = self.assigned_work[node]
        ended = next((test for tests in left.values() for test, is_done in tests.items() if not is_done), None)
        for file, tests in [*left.items()]:
            if ended in tests:
                tests[ended] = True
            if all(tests.values()):
                del left[file]
        self.workqueue.update(left)
        del self.assigned_work[node]
        for other in self.nodes:
            self._reschedule(other)
        return ended

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:  # it has just begun, and asks when it knows its tests
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
