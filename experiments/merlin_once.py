"""The edit that hardens an exported ensemble: within one request, each node of the graph is evaluated once.

merlin-core's executor walks from the output to the inputs and runs a node again for every node that uses it: in this graph the
users' workflow four times and retrieval twice. Copied beside the hardened variants' model.py.
"""

from merlin.dag.executors import LocalExecutor


class OnceExecutor(LocalExecutor):
    """LocalExecutor that keeps the output of each node. An executor lives for one request."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._outputs: dict[int, object] = {}

    def _execute_node(self, node, transformable, capture_dtypes=False, strict=False):
        if id(node) not in self._outputs:
            self._outputs[id(node)] = super()._execute_node(node, transformable, capture_dtypes, strict)
        return self._outputs[id(node)]
