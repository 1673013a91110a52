"""Keep gRPC's C core from writing into the gateway's log, whose lines are JSON. Errors of calls carry the same information.

The C core reads this setting once, when grpc is imported, so import this module first.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
