"""Builds the fake GPUs and installs them beside torch's CUDA build in this virtual environment.

`python -m tests.fakegpu.build [--clock-alone]` needs g++ and binutils, and torch installed with
`pip install --no-deps`. It compiles what changed, gives each NVIDIA library that torch links an
empty library of its name that depends on libfakecuda.so, and makes a stub of each symbol that torch
needs and no source defines. stubs.txt lists the known stubs; others are reported. With
`--clock-alone`, it leaves out the plug-in, which takes longest: such fake GPUs need
`FAKECUDA_NUMERICS=0`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_path("purelib"))
TORCH = SITE / "torch"
BUILD = Path(sys.prefix) / "fakegpu"
SHARED = HERE.parents[1] / "build" / "fakegpu" / "objects"
"""The objects of src/, which know nothing of torch: the environments of all versions link them."""
NEEDED = BUILD / "needed.txt"
JOBS = 2

COMPILE = ["g++", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-c"]
NVIDIA_LIBRARY = re.compile(r"\[(lib(?:cu|nv|nccl)[\w-]*\.so\.\d+)\]")
NVIDIA_SYMBOL = re.compile(
    r"_*cuda[A-Z]|cu[A-Z]|cu(?:blas|dnn|fft|file|pti|rand|solver|sparse)[A-Z_]|nccl|nvrtc|nvshmem"
)
# the first status that fits is how a stub says "not supported"
STATUS = {
    "cublas": 15,
    "cudnn": 3000,
    "nccl": 5,
    "cusparse": 10,
    "cufft": 16,
    "cusolver": 9,
    "nvrtc": 11,
    "cupti": 27,
    "cuFile": 5000,
    "nvshmem": 1,
    "cu": 801,
}
STUBS_BEGIN = """\
#include <cstdio>
#include <cstdlib>
#define STUB extern "C" __attribute__((visibility("default")))
static int refuse(const char* name, int status) {
  static const bool trace = getenv("FAKECUDA_TRACE") != nullptr;
  if (trace) fprintf(stderr, "fakecuda: %s is a stub\\n", name);
  return status;
}
"""


def output(*command: str | Path) -> str:
    """What a command prints; its failure ends the build."""
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode != 0:
        raise SystemExit(f"failed: {' '.join(map(str, command))}")
    return ended.stdout


def is_older(made: Path, sources: list[Path]) -> bool:
    return not made.exists() or made.stat().st_mtime < max(one.stat().st_mtime for one in sources)


def symbols(library: Path, *options: str) -> set[str]:
    """Names of symbols without their versions."""
    lines = output("nm", *options, library).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def needed_by_torch() -> set[str]:
    """NVIDIA's symbols that torch's libraries import."""
    libraries = sorted((TORCH / "lib").glob("*.so"))
    if is_older(NEEDED, libraries):
        found = set().union(*(symbols(one, "-D", "--undefined-only") for one in libraries))
        NEEDED.write_text("\n".join(sorted(filter(NVIDIA_SYMBOL.match, found))))
    return set(NEEDED.read_text().split())


def compile_changed(folder: str, into: Path, options: list[str], further: list[Path]) -> list[Path]:
    """Object files of a folder's sources; those older than a header are made again."""
    into.mkdir(parents=True, exist_ok=True)
    headers = [*HERE.glob(f"{folder}/**/*.h"), HERE / "build.py", *further]
    objects = []
    commands = []
    for source in sorted((HERE / folder).glob("*.cpp")):
        made = into / f"{folder}-{source.stem}.o"
        objects.append(made)
        if is_older(made, [source, *headers]):
            commands.append([*COMPILE, *options, str(source), "-o", str(made)])
    if commands:
        print(f"compiling {len(commands)} sources of tests/fakegpu/{folder}", flush=True)
    with ThreadPoolExecutor(JOBS) as pool:
        for _ in pool.map(lambda command: output(*command), commands):
            pass
    return objects


def stub(name: str) -> str:
    """The definition of a function that does nothing and says that it is not supported."""
    if name.endswith(("GetErrorString", "GetErrorName")):
        return f'STUB const char* {name}() {{ return "not supported by the fake GPUs"; }}'
    status = next(
        number for prefix, number in STATUS.items() if name.lstrip("_").startswith(prefix)
    )
    return f'STUB int {name}() {{ return refuse("{name}", {status}); }}'


def write_stubs(missing: set[str]) -> Path:
    """A source with a stub of each missing symbol; reports those that stubs.txt does not know."""
    known = (HERE / "src/stubs.txt").read_text().split("\n")
    patterns = [line for line in known if line and not line.startswith("#")]
    new = sorted(name for name in missing if not any(fnmatch(name, one) for one in patterns))
    if new:
        count = f"{len(new)} new symbol{'s' * (len(new) > 1)}"
        print(f"torch {metadata.version('torch')} needs {count}: {', '.join(new)}")
        print("each is a stub now: implement it, or name it in tests/fakegpu/src/stubs.txt")
    path = BUILD / "stubs.cc"
    path.write_text(STUBS_BEGIN + "\n".join(map(stub, sorted(missing))) + "\n")
    return path


def link(made: Path, *arguments: str | Path) -> None:
    """Link a library and put it into its place at once: processes may have the old one mapped."""
    fresh = made.with_suffix(".new")
    output("g++", "-shared", "-fPIC", "-o", fresh, *arguments, f"-L{made.parent}")
    fresh.replace(made)


def installed_folder() -> Path:
    """Where torch's libraries look for NVIDIA's, without a library of NVIDIA."""
    library = TORCH / "lib/libtorch_cuda.so"
    if not library.exists():
        raise SystemExit(f"{sys.prefix} holds no CUDA build of torch")
    dynamic = output("readelf", "-d", library)
    found = re.search(r"nvidia/cu\d+/lib", dynamic)
    if found is None:
        raise SystemExit(f"{TORCH} does not look for NVIDIA's libraries in nvidia/cu*/lib")
    folder = SITE / found[0]
    if folder.exists() and not (folder / "libfakecuda.so").exists():
        raise SystemExit(
            f"{folder} holds NVIDIA's libraries: install torch with `pip install --no-deps`"
            " into an environment of its own"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sonames() -> list[str]:
    """NVIDIA's libraries that torch links, and the one that pynvml opens."""
    dynamic = [output("readelf", "-d", one) for one in sorted((TORCH / "lib").glob("*.so"))]
    return sorted({*NVIDIA_LIBRARY.findall("".join(dynamic)), "libnvidia-ml.so.1"})


def build_libraries(folder: Path) -> None:
    """libfakecuda.so, and an empty library for each of NVIDIA's."""
    objects = compile_changed("src", SHARED, ["-O2", f"-I{HERE / 'src'}"], [])
    defined = set().union(*(symbols(one, "--defined-only") for one in objects))
    stubs = write_stubs(needed_by_torch() - defined)
    core = folder / "libfakecuda.so"
    if not is_older(core, [*objects, NEEDED]):
        return
    link(core, stubs, *objects, "-Wl,-soname,libfakecuda.so", "-Wl,--no-undefined")
    for name in sonames():
        link(
            folder / name,
            f"-Wl,-soname,{name}",
            "-Wl,-rpath,$ORIGIN",
            "-Wl,--no-as-needed",
            "-lfakecuda",
        )


def build_plugin(folder: Path) -> None:
    """The library that computes operators' numbers; it uses torch, and the calls fakecuda_*."""
    include = [TORCH / "include", TORCH / "include/torch/csrc/api/include"]
    own = [f"-I{HERE / 'plugin'}", f"-I{HERE / 'src'}"]
    options = ["-O1", *own, *(f"-isystem{path}" for path in include)]
    objects = compile_changed("plugin", BUILD, options, [TORCH / "version.py"])
    made = folder / "libfakenumerics.so"
    if objects and is_older(made, objects):
        libraries = ["-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", "-lfakecuda"]
        found_at = ["-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"]
        link(made, *objects, f"-L{TORCH / 'lib'}", *libraries, *found_at)


def install_loaders(folder: Path) -> None:
    """Let torch load the plug-in at its import, and pynvml find the fake NVML."""
    shutil.copy(HERE / "fakecuda.py", SITE / "fakecuda.py")
    package = SITE / "fakecuda-0.dist-info"
    package.mkdir(exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fakecuda\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nfakecuda = fakecuda:load\n")
    nvml = folder / "libnvidia-ml.so.1"
    (SITE / "fakecuda.pth").write_text(f"import ctypes; ctypes.CDLL({str(nvml)!r})\n")


def main() -> None:
    """Build and install; a second run makes only what changed."""
    missing = [tool for tool in ("g++", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"{' and '.join(missing)} not found: the fake GPUs need g++ and binutils")
    BUILD.mkdir(exist_ok=True)
    folder = installed_folder()
    build_libraries(folder)
    if "--clock-alone" not in sys.argv[1:]:
        build_plugin(folder)
    install_loaders(folder)


if __name__ == "__main__":
    main()
