"""Start a program with arguments that other users of the machine cannot read.

Everybody can read /proc/PID/cmdline, and tritonserver and perf_analyzer accept keys only as arguments. The kernel shows the
memory between two fixed addresses of the process, but the program follows its argument pointers:

    /proc/PID/cmdline   program  [hidden]                        readable by everybody
    argv[1] --------------------------------.
    /proc/PID/environ   PRIVATE_ARGUMENT_0=--option=key          readable by the same user alone

So the private argument goes into the environment, and the parent redirects the pointer. It can, because the child asks to be
traced (ptrace) and is therefore stopped before the program's first instruction. The key is never in the command line.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PTRACE_TRACEME, PTRACE_DETACH = 0, 17
ENVIRONMENT_NAME = "PRIVATE_ARGUMENT_{}"
VISIBLE_WARNING = (
    "warning: every user of this machine can read the server's key in the command line of {program}: the kernel forbids this "
    "user to trace its children (kernel.yama.ptrace_scope, or a container's seccomp profile). Allow it, and start again."
)
PLACEHOLDER = "[hidden]"
REFUSED_EXIT_CODE, ABSENT_EXIT_CODE = 113, 127  # of the child: it may not be traced, or the program does not exist
# Linux, 64 bit: fields of /proc/PID/stat, counted from 1 as in proc(5)
START_STACK, ENV_START, ENV_END = 28, 50, 51
WORD = struct.Struct("<Q")

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.restype = ctypes.c_long
_LIBC.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)

# Runs in a separate Python process, which becomes the program: none of our code runs between fork and exec here.
TRACED_EXEC = f"""
import ctypes, os, sys
if ctypes.CDLL(None).ptrace({PTRACE_TRACEME}, 0, None, None):
    os._exit({REFUSED_EXIT_CODE})
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError:
    os._exit({ABSENT_EXIT_CODE})
"""


def start_privately(command: Sequence[str], private: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen:
    """Start `command` followed by the arguments `private`. Other users see `[hidden]` in place of each of these.

    Where tracing is forbidden (kernel.yama.ptrace_scope of 2 or 3, or a container), the program starts anyway, with a warning
    that its arguments can be read. options: passed to `subprocess.Popen`
    """
    if not private:
        return subprocess.Popen(command, env=env, **options)
    names = map(ENVIRONMENT_NAME.format, range(len(private)))
    traced = [sys.executable, "-I", "-S", "-c", TRACED_EXEC, *command, *[PLACEHOLDER] * len(private)]
    process = subprocess.Popen(traced, env=dict(env) | dict(zip(names, private, strict=True)), **options)
    try:
        _, status = os.waitpid(process.pid, 0)
        if os.WIFSTOPPED(status):
            _point_to_environment(process.pid, len(private))
            if _LIBC.ptrace(PTRACE_DETACH, process.pid, None, None):
                raise OSError(ctypes.get_errno(), "a traced process cannot be detached")
            return process
        process.returncode = os.waitstatus_to_exitcode(status)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode != REFUSED_EXIT_CODE:
        raise FileNotFoundError(f"{command[0]} cannot be started")
    print(VISIBLE_WARNING.format(program=command[0]), file=sys.stderr)
    return subprocess.Popen([*command, *private], env=env, **options)


def _point_to_environment(pid: int, count: int) -> None:
    """Point the last `count` argument pointers to the private arguments in the environment."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    stack, env_start, env_end = (int(fields[number - 3]) for number in (START_STACK, ENV_START, ENV_END))
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(stack)
        (argc,) = WORD.unpack(memory.read(WORD.size))
        memory.seek(env_start)
        environment = memory.read(env_end - env_start)
        for number in range(count):
            name = f"{ENVIRONMENT_NAME.format(number)}=".encode()
            position = (b"\0" + environment).index(b"\0" + name)
            memory.seek(stack + WORD.size * (1 + argc - count + number))  # argc, then a pointer per argument
            memory.write(WORD.pack(env_start + position + len(name)))
