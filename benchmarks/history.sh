#!/bin/sh
# Measure the last $COMMITS commits of HEAD with asv, oldest first, and publish them in .asv/html.
#
#   COMMITS=3           how many
#   DPBENCH_QUICK=1     few samples; 0 takes as many as the numbers deserve
#
# The python on PATH measures, and nothing is installed into it: dpbench is pure Python, so each commit's package is
# unpacked to a temporary folder that comes first on the import path. However this ends, SIGKILL included, the
# environment keeps the install it has. Unpacked from an archive rather than checked out as a worktree, because that
# leaves nothing in the repository either.
set -eu

cd "$(dirname "$0")/.."
COMMITS=${COMMITS:-3}
DPBENCH_QUICK=${DPBENCH_QUICK:-1}
export DPBENCH_QUICK OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
unset PYTHONPATH

say() { printf 'history: %s\n' "$*" >&2; }

case $COMMITS in '' | *[!0-9]* | 0) say "COMMITS must be a number from 1 on, got '$COMMITS'"; exit 64 ;; esac
# asv keys results by the interpreter's path, so a link must stay a link: no realpath
python=$(command -v python) || { say "no python on PATH; run: make history"; exit 1; }
"$python" -c 'import asv, importlib.util as u; u.find_spec("torch") or exit(1)' ||
    { say "$python lacks asv or torch; run: make history"; exit 1; }

# of asv's kind: the first parents only, or publish would not find them on the branch
commits=$(git rev-list --first-parent --reverse --max-count="$COMMITS" HEAD)
found=$(printf '%s\n' "$commits" | wc -l | tr -d ' ')
[ "$found" -eq "$COMMITS" ] || say "$COMMITS commits asked for, HEAD has $found: measuring those"
[ "$DPBENCH_QUICK" = 0 ] || say "quick: few samples; for the full ones: DPBENCH_QUICK=0 make history"
[ -z "$(git status --porcelain -- dpbench)" ] || say "uncommitted changes in dpbench/ are not measured"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
work=$(cd "$work" && pwd -P)

# an existing file is the user's own; asv would overwrite what it says about this machine
[ -f "$HOME/.asv-machine.json" ] || "$python" -m asv machine --yes >/dev/null

top=$(pwd -P)

# python runs sitecustomize.py at its start. The finder of an editable install looks a module up in the working tree
# when the commit's package lacks it, and what should be n/a would be a chimera of two commits
alone='import sys

sys.meta_path[:] = [
    finder for finder in sys.meta_path
    if "dpbench" not in getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", ())
]'

# fails unless whatever the working tree has of dpbench comes from the commit (argument 1) or not at all
origins='import pkgutil, sys
from importlib.util import find_spec

tree, top = sys.argv[1:]
for name in ["dpbench", *("dpbench." + module.name for module in pkgutil.iter_modules([top + "/dpbench"]))]:
    spec = find_spec(name)
    if spec and spec.origin and not spec.origin.startswith(tree + "/"):
        sys.exit(f"history: {name} would come from {spec.origin}")'

# Measure commit $1: 0 done, else asv's exit status.
measure() {
    tree=$work/$1
    if ! git cat-file -e "$1:dpbench/__init__.py" 2>/dev/null; then
        say "$(git log -1 --format='%h %s' "$1"): has no dpbench, left out"
        return 0
    fi
    mkdir "$tree"
    git archive --format=tar --output="$tree.tar" "$1" dpbench || return 1
    tar -xf "$tree.tar" -C "$tree" || return 1
    printf '%s\n' "$alone" >"$tree/sitecustomize.py"
    # never file one commit's numbers under another's name
    (cd / && PYTHONPATH=$tree "$python" -c "$origins" "$tree" "$top") || return 1
    say "$(git log -1 --format='%h %s' "$1")"  # asv's own heading names HEAD instead
    # asv sets the import path of its own processes from ASV_PYTHONPATH, theirs inherit PYTHONPATH
    PYTHONPATH=$tree ASV_PYTHONPATH=$tree "$python" -m asv run --environment "existing:$python" \
        --set-commit-hash "$1" --no-pull --record-samples --show-stderr
}

status=0
for commit in $commits; do
    measure "$commit" || { status=$?; say "$commit: something failed (exit status $status); going on"; }
done

# the files that make the page work without a network; without npm the page says what it needs
vendor=.asv/vendor
if command -v npm >/dev/null && [ ! -f "$vendor/installed" ]; then
    mkdir -p "$vendor"
    # shellcheck disable=SC2046  # one word a package
    if npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$vendor" \
        $("$python" reports/asv_offline.py); then
        : >"$vendor/installed"
    else
        say "npm could not install the page's files; see below"
    fi
fi

"$python" -m asv publish --no-pull || status=$?
[ "$status" -eq 0 ] || say "failed with exit status $status; the lines marked 'failed' above say where"
say "open .asv/html/index.html through a server: $python -m http.server --bind 127.0.0.1 --directory .asv/html"
exit "$status"
