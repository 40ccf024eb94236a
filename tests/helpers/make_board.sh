#!/usr/bin/env bash
# Makes the system of an emulated board in a directory: Debian's Python for aarch64, and TVM from its wheel.
# Usage: make_board.sh DIRECTORY PYTHON, the interpreter whose version of TVM the board gets.
set -euo pipefail
board=$1 python=$2
mkdir -p "$board"/apt/{lists,archives}/partial "$board/root" "$board/site"
board=$(cd "$board" && pwd)

# apt with an empty system of another architecture beside the real one, which stays as it is
touch "$board/apt/status"
cat > "$board/apt/apt.conf" <<EOF
APT { Architecture "arm64"; Architectures { "arm64"; }; Install-Recommends "false"; };
Dir { State "$board/apt"; State::status "$board/apt/status"; Cache "$board/apt"; };
APT::Sandbox::User "$(id -un)";
EOF
export APT_CONFIG="$board/apt/apt.conf"
apt-get update -qq
version=$(apt-cache depends python3-minimal | sed -n 's/.*Depends: python\(3\.[0-9]*\)-minimal/\1/p')
apt-get install -y -qq --download-only "python$version-minimal" "libpython$version-stdlib" libstdc++6 > /dev/null
for package in "$board"/apt/archives/*.deb; do dpkg-deb --extract "$package" "$board/root"; done

tvm=()
for package in apache-tvm apache-tvm-ffi; do
    tvm+=("$package==$("$python" -c "from importlib.metadata import version; print(version('$package'))")")
done
platforms=()
for glibc in 17 24 27 28 34; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
"$python" -m pip install --quiet --target "$board/site" --python-version "$version" --only-binary :all: \
    --platform manylinux2014_aarch64 "${platforms[@]}" "${tvm[@]}"
rm -rf "$board/apt"
