#!/usr/bin/env bash
# pin.sh: writes serve.txt, export.txt and dev.txt from the .in files beside them, for CPython 3.11 and 3.12 at once (a package
# whose version differs has a line for each, with a marker). What is pinned stays unless an .in file or an argument asks for another:
#   requirements/pin.sh                        # after an edit of an .in file
#   requirements/pin.sh --upgrade-package rich # or --upgrade, for all of them
set -euo pipefail
cd "$(dirname "$0")/.."

for set in dev export serve; do
  # the smaller sets take the versions of the largest one
  known=()
  [ "$set" = dev ] || known=(--constraint requirements/dev.txt)
  .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --override requirements/overrides.txt "${known[@]}" "$@" \
    --no-emit-index-url --no-emit-find-links --annotation-style line --custom-compile-command requirements/pin.sh \
    "requirements/$set.in" --output-file "requirements/$set.txt"
  # every line is for Linux on x86-64 and for these two versions (pyproject.toml): only what differs between the two is kept
  sed -i -E "s/ and (implementation_name|platform_machine|platform_python_implementation|sys_platform) [!=]= '[A-Za-z0-9_]+'//g
             s/ ; python_full_version < '3\.13'//; s/ -c requirements\/dev\.txt,?//; s/,$//; s/ +# via$//" "requirements/$set.txt"
done
