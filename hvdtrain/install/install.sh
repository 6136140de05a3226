#!/bin/sh
# Install hvdtrain and its dependencies from the folder of this script, without a package registry.
#
#     install.sh VENV [PYTHON]
#
# VENV    the virtual environment to create; an incomplete one of this script is created again
# PYTHON  the interpreter to create it with, of version @PYTHON@; if it has torch, that torch is used
#
# If mpicxx is on PATH, its MPI is used, otherwise the Open MPI of the bundle. Horovod is compiled for that MPI and torch.
# BUILD in the environment: options of hvdtrain build-horovod, for example BUILD='--prove later'.
# Exit status: 0 installed; 1 failed, with an explanation (expected, found, next); 2 wrong usage.
set -eu

for_python='@PYTHON@'
for_machine='@MACHINE@'
for_glibc='@GLIBC_MINOR@'
needed_kib='@NEEDED_KIB@'
extras='@EXTRAS@'
open_mpi='@OPEN_MPI@'
for_installed='@INSTALLED@'

fail() { # what, expected, found, next; empty ones are not printed
  printf 'error: %s\n' "$1" >&2
  [ -z "$2" ] || printf '  expected: %s\n' "$2" >&2
  [ -z "$3" ] || printf '  found: %s\n' "$3" >&2
  [ -z "$4" ] || printf '  next: %s\n' "$4" >&2
  exit 1
}

check_files() {
  again='copy the bundle again, or make it again: hvdtrain bundle'
  [ -f "$here/SHA256SUMS" ] || fail 'The bundle has no SHA256SUMS: it is incomplete.' '' '' "$again"
  damaged=$(cd "$here" && LC_ALL=C sha256sum --check --strict --quiet SHA256SUMS 2>&1) ||
    fail 'The bundle is damaged.' 'files that match SHA256SUMS' "$damaged" "$again"
  for file in "$here"/packages/*; do
    cut -c 67- "$here/SHA256SUMS" | grep -qxF -- "packages/${file##*/}" ||
      fail 'The bundle contains an unknown file.' 'only files named in SHA256SUMS' \
        "packages/${file##*/}" 'remove it'
  done
}

check_machine() {
  other='make a bundle for this machine: hvdtrain bundle --platform'
  libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc='no glibc'
  machine=$(uname -m)
  [ "$(uname -s) $machine" = "Linux $for_machine" ] ||
    fail 'The bundle is for another kind of machine.' "Linux on $for_machine" "$(uname -s) on $machine" \
      "$other manylinux_2_${libc##*.}_$machine"
  case $libc in
    'glibc 2.'*) ;;
    *) fail 'This machine has no glibc, which torch needs.' "glibc 2.$for_glibc or newer" "$libc" \
      'use a container with glibc' ;;
  esac
  [ "${libc##*.}" -ge "$for_glibc" ] ||
    fail 'The glibc of this machine is too old for the bundle.' "glibc 2.$for_glibc or newer" "$libc" \
      "$other manylinux_2_${libc##*.}_$machine"
}

check_python() {
  command -v "$python" >/dev/null ||
    fail "$python was not found." "Python $for_python" '' "name one: install.sh VENV /path/to/python$for_python"
  found=$("$python" -c 'import sys; print("%s %d.%d%s" % (sys.implementation.name, *sys.version_info[:2], sys.abiflags))') ||
    found='an interpreter that does not run'
  [ "$found" = "cpython $for_python" ] ||
    fail 'The bundle is for another Python.' "cpython $for_python" "$found ($python)" \
      "name one: install.sh VENV /path/to/python$for_python, or make a bundle for this Python: hvdtrain bundle --python"
  "$python" -c 'import venv' 2>/dev/null ||
    fail "$python cannot make virtual environments: it lacks venv." '' '' "sudo apt-get install python$for_python-venv"
  for name in $for_installed; do
    command -v "$name" >/dev/null ||
      "$python" -c 'import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])' "$name" 2>/dev/null ||
      fail "$python has no $name, and the bundle was made for a Python that has it." '' '' \
        "name a Python with $name: install.sh VENV /path/to/python$for_python; or make a bundle that contains it"
  done
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    fail "The headers of Python (Python.h) are not installed. Building Horovod needs them." '' '' \
      "sudo apt-get install python$for_python-dev   (Fedora, RHEL: sudo dnf install python3-devel)"
}

check_compiler() {
  fix='sudo apt-get install g++ make   (Fedora, RHEL: sudo dnf install gcc-c++ make; on a cluster: module load gcc)'
  compiler=${CXX:-$(command -v g++ || command -v c++ || true)}
  case $(sh -c "${CXX:-:} --version" 2>/dev/null) in # modules set CXX to these; the build uses g++ instead
    *nvc++* | pgc++* | icp* | 'Intel(R)'* | Cray*) compiler=$(command -v g++ || true) ;;
  esac
  [ -n "$compiler" ] ||
    fail 'No C++ compiler was found, and building Horovod needs one.' "g++ on PATH, or another one in \$CXX" '' "$fix"
  version=$(sh -c "$compiler -dumpfullversion -dumpversion" 2>/dev/null) || version='of unknown version'
  major=${version%%.*}
  [ "$major" -ge 9 ] 2>/dev/null ||
    fail 'The C++ compiler is too old for torch.' 'gcc 9 or clang 9, or newer' "$compiler $version" \
      'module load gcc   (on a cluster); or install a newer compiler and set CXX to it'
  command -v make >/dev/null || fail 'make is not installed, and building Horovod needs it.' '' '' "$fix"
}

check_room() {
  folder=$venv
  while [ ! -d "$folder" ]; do folder=$(dirname -- "$folder"); done
  [ -w "$folder" ] || fail "$folder cannot be written." '' '' 'name another folder for VENV'
  free=$(df -Pk -- "$folder" | awk 'NR == 2 { print $4 }')
  [ "$free" -ge "$needed_kib" ] ||
    fail 'There is not enough free disk space.' "$((needed_kib / 1024)) MiB in $folder" "$((free / 1024)) MiB" \
      'free some space, or name a folder on another disk for VENV'
}

make_folder() {
  log=$venv/install.log
  if [ -d "$venv" ] && [ -n "$(ls -A -- "$venv")" ]; then
    grep -qs '^hvdtrain install.sh' "$log" ||
      fail "$venv exists and was not created by this script." 'a new folder, or an empty one' '' \
        "name another folder, or move $venv away"
    rm -rf -- "$venv"
  fi
  mkdir -p -- "$venv"
  printf 'hvdtrain install.sh\n' >"$log"
}

only_this_bundle() { # ignore the pip settings of the machine and the user
  for name in $(env | sed -n 's/^\(PIP_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "$name"; done
  PIP_FIND_LINKS=$("$python" -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).as_uri())' "$here/packages")
  PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1
  export PIP_CONFIG_FILE PIP_NO_INDEX PIP_FIND_LINKS PIP_DISABLE_PIP_VERSION_CHECK
}

run() { # doing, command and its arguments
  printf '%s\n' "$1"
  doing=$1
  shift
  "$@" >>"$log" 2>&1 || {
    tail -n 15 -- "$log" >&2
    fail "Failed while $doing." '' '' "read the log: $log"
  }
}

# Share the torch of the interpreter, with code of hvdtrain. Print "mpi" if the machine has an MPI.
share='
import os, pathlib, sys
from hvdtrain.install.venv import base_interpreter, share_packages
venv = pathlib.Path(sys.argv[1])
base = base_interpreter(os.environ, venv)
share_packages(venv, base)
print("mpi" if base.has_mpi else "")
'

main() {
  if [ $# -lt 1 ] || [ $# -gt 2 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
    printf 'usage: install.sh VENV [PYTHON]   (PYTHON: an interpreter of version %s)\n' "$for_python" >&2
    exit 2
  fi
  here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
  case $1 in /*) venv=$1 ;; *) venv=$(pwd -P)/$1 ;; esac
  python=${2:-$(command -v "python$for_python" || echo python3)}
  printf 'checking the bundle and this machine\n'
  check_files
  check_machine
  check_python
  check_compiler
  check_room
  make_folder
  only_this_bundle
  own=$venv/bin/python
  run "creating $venv with $python" "$python" -m venv --without-pip "$venv"
  for pip in "$here"/packages/pip-*.whl; do :; done # there is one
  run 'installing pip' "$own" "$pip/pip" install --quiet pip
  run 'installing hvdtrain' "$own" -m pip install --quiet --no-deps hvdtrain
  site=$venv/lib/python$for_python/site-packages
  has=$(PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} "$python" -c "$share" "$venv") ||
    fail "Failed while checking the packages of $python." '' '' 'see the lines above'
  mpi="$open_mpi"
  [ "$has" != mpi ] || mpi=hvdtrain
  run 'installing torch and all other packages (minutes if torch includes CUDA)' \
    "$own" -m pip install --quiet --upgrade --upgrade-strategy eager setuptools wheel "hvdtrain[$extras]" "$mpi"
  printf 'building Horovod\n'
  # shellcheck disable=SC2086 # words
  "$venv/bin/hvdtrain" build-horovod ${BUILD:-} ||
    fail 'Horovod could not be built.' '' '' "fix the error above, then run this script again; or only: $venv/bin/hvdtrain \
build-horovod, with PIP_NO_INDEX=1 PIP_FIND_LINKS=$PIP_FIND_LINKS"
  PATH=$venv/bin:$PATH "$venv/bin/hvdtrain" doctor || [ $? = 1 ] || # 1: warnings
    fail 'hvdtrain doctor found a broken installation.' '' '' 'see the lines above that begin with "broken"'
  printf 'hvdtrain is installed: . %s/bin/activate\n' "$venv"
}

main "$@" # in the last line, so that a truncated script does nothing
