#!/bin/sh
# Installs hvdtrain with all that it needs, from the folder that this script lies in: no registry is asked.
#
#     install.sh VENV [PYTHON]
#
# VENV    the virtual environment to make; one that this script began before is made anew
# PYTHON  the interpreter to make it with, of version @PYTHON@; one that has a torch of its own lends it
#
# An MPI whose mpicxx is on PATH is used; without one, Open MPI comes from the bundle. Horovod is compiled for the torch
# and the MPI that are there. Exit status: 0 installed, 1 not: what, expected, found and next say why, 2 wrong usage.
set -eu

for_python='@PYTHON@'
for_machine='@MACHINE@'
for_glibc='@GLIBC_MINOR@'
needed_kib='@NEEDED_KIB@'
extras='@EXTRAS@'
open_mpi='@OPEN_MPI@'

fail() { # what, expected, found, next; an empty one is left out
  printf 'error: %s\n' "$1" >&2
  [ -z "$2" ] || printf '  expected: %s\n' "$2" >&2
  [ -z "$3" ] || printf '  found: %s\n' "$3" >&2
  [ -z "$4" ] || printf '  next: %s\n' "$4" >&2
  exit 1
}

check_files() {
  again='carry the bundle here again, or make it again: hvdtrain bundle'
  [ -f "$here/SHA256SUMS" ] || fail 'The bundle has no SHA256SUMS: it was never finished.' '' '' "$again"
  damaged=$(cd "$here" && LC_ALL=C sha256sum --check --strict --quiet SHA256SUMS 2>&1) ||
    fail 'The bundle is damaged.' 'every file as SHA256SUMS has it' "$damaged" "$again"
  for file in "$here"/packages/*; do
    cut -c 67- "$here/SHA256SUMS" | grep -qxF -- "packages/${file##*/}" ||
      fail 'The bundle has a file that does not belong to it.' 'only files that SHA256SUMS names' \
        "packages/${file##*/}" 'remove it'
  done
}

check_machine() {
  other='make a bundle for this machine: hvdtrain bundle --platform'
  libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc='no glibc'
  machine=$(uname -m)
  [ "$(uname -s) $machine" = "Linux $for_machine" ] ||
    fail 'The bundle is for other machines.' "Linux on $for_machine" "$(uname -s) on $machine" \
      "$other manylinux_2_${libc##*.}_$machine"
  case $libc in
    'glibc 2.'*) ;;
    *) fail 'This machine has no glibc, which torch needs.' "glibc 2.$for_glibc or newer" "$libc" \
      'use a container with glibc' ;;
  esac
  [ "${libc##*.}" -ge "$for_glibc" ] ||
    fail 'This machine is older than those that the bundle is for.' "glibc 2.$for_glibc or newer" "$libc" \
      "$other manylinux_2_${libc##*.}_$machine"
}

check_python() {
  command -v "$python" >/dev/null ||
    fail "There is no $python here." "Python $for_python" '' "name one: install.sh VENV /path/to/python$for_python"
  found=$("$python" -c 'import sys; print("%s %d.%d%s" % (sys.implementation.name, *sys.version_info[:2], sys.abiflags))') ||
    found='one that does not run'
  [ "$found" = "cpython $for_python" ] ||
    fail 'The bundle is for another Python.' "cpython $for_python" "$found ($python)" \
      "name one: install.sh VENV /path/to/python$for_python, or make a bundle for this one: hvdtrain bundle --python"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments: it lacks venv or ensurepip." '' '' \
      "sudo apt-get install python$for_python-venv"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    fail "The headers of Python (Python.h) are not installed, which building Horovod needs." '' '' \
      "sudo apt-get install python$for_python-dev   (Fedora, RHEL: sudo dnf install python3-devel)"
}

check_compiler() {
  mend='sudo apt-get install g++ make   (Fedora, RHEL: sudo dnf install gcc-c++ make; on a cluster: module load gcc)'
  compiler=${CXX:-$(command -v g++ || command -v c++ || true)}
  [ -n "$compiler" ] ||
    fail 'There is no C++ compiler, which building Horovod needs.' "g++ on PATH, or another one in \$CXX" '' "$mend"
  version=$(sh -c "$compiler -dumpfullversion -dumpversion" 2>/dev/null) || version='none that it would tell'
  major=${version%%.*}
  [ "$major" -ge 9 ] 2>/dev/null ||
    fail 'The C++ compiler is too old for torch.' 'gcc 9 or clang 9, or newer' "$compiler $version" \
      'install a newer one and set CXX to it'
  command -v make >/dev/null || fail 'There is no make, which building Horovod needs.' '' '' "$mend"
}

check_room() {
  folder=$venv
  while [ ! -d "$folder" ]; do folder=$(dirname -- "$folder"); done
  [ -w "$folder" ] || fail "$folder cannot be written." '' '' 'name another folder for VENV'
  free=$(df -Pk -- "$folder" | awk 'NR == 2 { print $4 }')
  [ "$free" -ge "$needed_kib" ] ||
    fail 'There is not enough free disk space.' "$((needed_kib / 1024)) MiB in $folder" "$((free / 1024)) MiB" \
      'free some, or name a folder on another disk for VENV'
}

make_folder() {
  log=$venv/install.log
  if [ -d "$venv" ] && [ -n "$(ls -A -- "$venv")" ]; then
    grep -qs '^hvdtrain install.sh' "$log" ||
      fail "$venv is there, and was not made by this script." 'a new folder, or an empty one' '' \
        "name another one, or move $venv away"
    rm -rf -- "$venv"
  fi
  mkdir -p -- "$venv"
  printf 'hvdtrain install.sh\n' >"$log"
}

only_this_bundle() { # what pip is told by the machine and its user must not count
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

# Prints what is not to be installed: "mpi" where the machine has one. Lends a torch by hvdtrain's own means.
lend='
import os, pathlib, sys
from hvdtrain.install.venv import lend, lender
venv = pathlib.Path(sys.argv[1])
source = lender(os.environ, venv)
lend(venv, source)
print("mpi" if source.has_mpi else "")
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
  run "making $venv with $python" "$python" -m venv "$venv"
  run 'installing build tools' "$own" -m pip install --quiet --upgrade pip setuptools wheel
  run 'installing hvdtrain' "$own" -m pip install --quiet --no-deps hvdtrain
  site=$venv/lib/python$for_python/site-packages
  has=$(PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} "$python" -c "$lend" "$venv") ||
    fail "Failed while looking at what $python has." '' '' 'see the lines above'
  mpi="$open_mpi"
  [ "$has" != mpi ] || mpi=hvdtrain
  run 'installing torch and all else (minutes where torch comes with CUDA)' \
    "$own" -m pip install --quiet "hvdtrain[$extras]" "$mpi"
  printf 'building Horovod\n'
  "$venv/bin/hvdtrain" build-horovod ||
    fail 'Horovod could not be built.' '' '' "mend what is said above, then run this again; or only: $venv/bin/hvdtrain \
build-horovod, with PIP_NO_INDEX=1 PIP_FIND_LINKS=$PIP_FIND_LINKS"
  PATH=$venv/bin:$PATH "$venv/bin/hvdtrain" doctor || [ $? = 1 ] || # 1: warnings
    fail 'Something that was installed does not fit together.' '' '' 'see the lines above that begin with "broken"'
  printf 'hvdtrain is installed: . %s/bin/activate\n' "$venv"
}

main "$@" # all of it has been read by now: a script that was cut off does nothing
