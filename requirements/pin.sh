#!/usr/bin/env bash
# pin.sh: writes serve.txt, export.txt and dev.txt from the .in files beside them, for CPython 3.11 and 3.12 at once (a package
# whose version differs has a line for each, with a marker), and hashes.txt: the SHA-256 of every file that a pin may be installed
# from, except torch, whose CPU build comes from another place on each machine. What is pinned stays unless an .in file or an
# argument asks for another:
#   requirements/pin.sh                        # after an edit of an .in file
#   requirements/pin.sh --upgrade-package rich # or --upgrade, for all of them
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
  .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-emit-find-links \
    --custom-compile-command requirements/pin.sh "$@"
}
# every line is for Linux on x86-64 and for these two versions (pyproject.toml): only what differs between the two is kept
shorten() {
  sed -i -E "s/ and (implementation_name|platform_machine|platform_python_implementation|sys_platform) [!=]= '[A-Za-z0-9_]+'//g
             s/ ; python_full_version < '3\.13'//; s/ -c requirements\/dev\.txt,?//; s/,$//; s/ +# via$//" "$1"
}

for set in dev export serve; do
  # the smaller sets take the versions of the largest one
  known=()
  [ "$set" = dev ] || known=(--constraint requirements/dev.txt)
  compile --override requirements/overrides.txt "${known[@]}" "$@" --annotation-style line \
    "requirements/$set.in" --output-file "requirements/$set.txt"
  shorten "requirements/$set.txt"
done

rm -f requirements/hashes.txt
compile --override requirements/overrides.txt --constraint requirements/dev.txt --generate-hashes --unsafe-package torch --no-annotate \
  requirements/dev.in --output-file requirements/hashes.txt
# uv itself, which setup.sh and the CPU image install first
sed -n 's/^UV_VERSION=/uv==/p' setup.sh | compile --generate-hashes --no-annotate --output-file requirements/uv.txt -
# what `make check-deploy` validates with, in an environment of its own
compile --generate-hashes --no-annotate requirements/deploy.in --output-file requirements/deploy.txt
for file in hashes uv deploy; do shorten "requirements/$file.txt"; done
