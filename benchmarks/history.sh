#!/bin/sh
# Measure the last $COMMITS commits of HEAD with asv, oldest first, and publish them in .asv/html.
#
#   COMMITS=3           the number of commits
#   ROUNDS=5            the number of rounds, in each of which every commit measures a benchmark in fresh processes
#   BENCH=regex         only the benchmarks whose names match; without it, all
#   AGAIN=1             measures also the benchmarks that have a result
#   DPBENCH_QUICK=1     1 takes few samples; 0 takes the full number
#
# Each round of a benchmark is saved as it ends. After a kill, the next run measures only the missing ones. A full result
# stands for a quick one, but not the reverse. At the end, the script says which differences between commits the rounds
# decide.
#
# The script measures with the python on PATH and installs no package into it. dpbench is pure Python, so each commit's
# package is unpacked to a temporary folder that is first on the import path, and the environment stays unchanged even
# if the script is killed. The package comes from an archive, because a worktree would leave files in the repository.
set -eu

cd "$(dirname "$0")/.."
COMMITS=${COMMITS:-3}
DPBENCH_QUICK=${DPBENCH_QUICK:-1}
ROUNDS=${ROUNDS:-5}
BENCH=${BENCH:-} AGAIN=${AGAIN:-}
export BENCH AGAIN ROUNDS DPBENCH_QUICK OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
unset PYTHONPATH

say() { printf 'history: %s\n' "$*" >&2; }

whole() { case $2 in '' | *[!0-9]* | 0) say "$1 must be an integer of at least 1, got '$2'"; exit 64 ;; esac; }
whole COMMITS "$COMMITS"
whole ROUNDS "$ROUNDS"
# asv identifies results by the interpreter's path, so do not resolve a symbolic link
python=$(command -v python) || { say "no python on PATH; run: make history"; exit 1; }
"$python" -c 'import asv, importlib.util as u; u.find_spec("torch") or exit(1)' ||
    { say "$python lacks asv or torch; run: make history"; exit 1; }

# only first parents, as in asv: publish ignores commits that are not on the branch
commits=$(git rev-list --first-parent --reverse --max-count="$COMMITS" HEAD)
found=$(printf '%s\n' "$commits" | wc -l | tr -d ' ')
[ "$found" -eq "$COMMITS" ] || say "HEAD has $found of the $COMMITS requested commits: measuring all of them"
[ "$DPBENCH_QUICK" = 0 ] || say "quick mode takes few samples; for the full number: DPBENCH_QUICK=0 make history"
[ -z "$(git status --porcelain -- dpbench)" ] || say "uncommitted changes in dpbench/ are not measured"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
work=$(cd "$work" && pwd -P)

# asv would overwrite a machine file that the user has edited
[ -f "$HOME/.asv-machine.json" ] || "$python" -m asv machine --yes >/dev/null

top=$(pwd -P)

# Python runs sitecustomize.py when it starts. This one removes the finder of an editable install, which would import
# modules that the commit lacks from the working tree, and so mix two commits
alone='import sys

sys.meta_path[:] = [
    finder for finder in sys.meta_path
    if "dpbench" not in getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", ())
]'

# fails if a module of the working tree's dpbench would not be imported from the commit's tree (argument 1)
origins='import pkgutil, sys
from importlib.util import find_spec

tree, top = sys.argv[1:]
for name in ["dpbench", *("dpbench." + module.name for module in pkgutil.iter_modules([top + "/dpbench"]))]:
    spec = find_spec(name)
    if spec and spec.origin and not spec.origin.startswith(tree + "/"):
        sys.exit(f"history: {name} would come from {spec.origin}")'

# Write the dpbench of commit $1 into a folder; return 0, or the exit status of the command that failed.
prepare() {
    tree=$work/$1
    mkdir "$tree"
    git archive --format=tar --output="$tree.tar" "$1" dpbench || return 1
    tar -xf "$tree.tar" -C "$tree" || return 1
    printf '%s\n' "$alone" >"$tree/sitecustomize.py"
    # never store one commit's results under another commit
    (cd / && PYTHONPATH=$tree "$python" -c "$origins" "$tree" "$top")
}

# Measure commit $1 with the options $2 of asv; return 0, or the exit status of the command that failed.
measure() {
    tree=$work/$1
    [ -d "$tree" ] || prepare "$1" || return 1
    say "$(git log -1 --format='%h %s' "$1")"  # asv's heading names HEAD
    # the options are one per line, and none of them is a pattern of files
    set -f
    IFS='
'
    # asv sets the import path of its processes from ASV_PYTHONPATH; their children inherit PYTHONPATH
    # shellcheck disable=SC2086
    DPBENCH_HISTORY=$top/.asv/trials/$1 PYTHONPATH=$tree ASV_PYTHONPATH=$tree "$python" -m asv run $2 \
        --environment "existing:$python" --set-commit-hash "$1" --no-pull --record-samples --show-stderr
    code=$?
    unset IFS
    set +f
    return "$code"
}

# torch takes a second to load, which each process of the suite would spend on counting
DPBENCH_GPUS=${DPBENCH_GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
export DPBENCH_GPUS

# asv lists the benchmarks of the working tree
mkdir -p .asv/trials
"$python" -m asv run --bench just-discover --environment "existing:$python" --no-pull >"$work/discovered" 2>&1 ||
    { cat "$work/discovered" >&2; say "asv cannot list the benchmarks"; exit 1; }
# shellcheck disable=SC2086  # one word per commit
expected=$("$python" reports/asv_history.py expect $commits)
say "$expected"

todo=
for commit in $commits; do
    name=$(git log -1 --format='%h %s' "$commit")
    if ! git cat-file -e "$commit:dpbench/__init__.py" 2>/dev/null; then
        say "$name: skipped, it has no dpbench"
    elif [ -z "$("$python" reports/asv_history.py select "$commit")" ]; then
        say "$name: every benchmark has a result"
    else
        todo="$todo $commit"
    fi
done

# Commits take turns in each round, so that a change of the machine does not look like a change of the code; asv itself
# interleaves rounds only in environments that it builds. Every second round goes backwards, against a steady drift
reversed=
for commit in $todo; do reversed="$commit $reversed"; done
status=0
groups=$("$python" reports/asv_history.py groups)
for group in ${groups:-""}; do
    for round in $(seq "$ROUNDS"); do
        [ $((round % 2)) -eq 1 ] && turns=$todo || turns=$reversed
        for commit in $turns; do
            benches=$("$python" reports/asv_history.py select "$commit" "$round" "$group")
            [ -n "$benches" ] || continue
            measure "$commit" "$benches" || { status=$?; say "$commit: failed (exit status $status); continuing"; }
        done
    done
done

# files for a page that works without a network; without npm the page names the missing files
vendor=.asv/vendor
if command -v npm >/dev/null && [ ! -f "$vendor/installed" ]; then
    mkdir -p "$vendor"
    # shellcheck disable=SC2046  # one word per package
    if npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$vendor" \
        $("$python" reports/asv_offline.py); then
        : >"$vendor/installed"
    else
        say "npm failed to install the page's files"
    fi
fi

"$python" -m asv publish --no-pull || status=$?
[ ! -f .asv/html/index.html ] || say "$("$python" reports/asv_offline.py .asv/html)"
# shellcheck disable=SC2086  # one word per commit
"$python" reports/asv_history.py differences $commits | while IFS= read -r line; do say "$line"; done
[ "$status" -eq 0 ] || say "failed with exit status $status; see the lines marked 'failed' above"
say "open file://$top/.asv/html/index.html in a browser"
exit "$status"
