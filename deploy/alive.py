"""Tell a liveness probe whether to restart a server: exit with 1 if the gateway in its pod reports that it does not answer.

The gateway sends its server a real request, because a server whose stage has died still reports that it is ready. If no
gateway can be reached, or if the gateway itself fails, the exit code is 0, because other gateways and gRPC callers may still
use the server.
"""

import sys
import urllib.error
import urllib.request

READY_URL = "http://127.0.0.1:8080/readyz"
TIMEOUT_S = 3.0
NOT_READY = 503


def main(url: str) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(url, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        print(f"the gateway says {error.code}: {error.read(500).decode(errors='replace')}")
        return int(error.code == NOT_READY)
    except OSError as error:
        print(f"no gateway says whether the server answers ({error})")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or [READY_URL]))
