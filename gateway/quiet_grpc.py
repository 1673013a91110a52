"""Keep gRPC's C core from writing into the log, each line of which is JSON. What fails is in the errors of calls, too.

The C core reads this setting once, when grpc is imported: this module has to come first.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
