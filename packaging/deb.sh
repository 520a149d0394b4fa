#!/usr/bin/env bash
# Builds the Debian package of this tree, and has lintian judge it: deb.sh FOLDER
#
# FOLDER gets ringdisk_VERSION-1_amd64.deb, whose path is printed. The program and the pages are built as ever, in the tree's target folder;
# the package is put together in a copy of what git knows. Needs debhelper, dpkg-dev and lintian: `make deb` installs them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${1:?a folder for the package}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/ringdisk" "$work/built"

cargo build --release --locked -p ringdisk -p ringdisk-pages >&2
cp "${CARGO_TARGET_DIR:-target}/release/ringdisk" "$work/built/"
"${CARGO_TARGET_DIR:-target}/release/ringdisk-pages" "$work/built/pages"

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -1)
git ls-files -z | tar --null --files-from=- --create | tar --extract --directory "$work/ringdisk"
cp -r packaging/debian "$work/ringdisk/debian"
# The changes are in CHANGELOG.md; Debian's list has the version.
cat >"$work/ringdisk/debian/changelog" <<END
ringdisk ($version-1) unstable; urgency=medium

  * See changelog.gz.

 -- The Ringdisk authors <ringdisk@ringdisk.invalid>  $(git log -1 --format=%cD)
END

export BUILT=$work/built DEB_BUILD_OPTIONS="noautodbgsym ${DEB_BUILD_OPTIONS:-}"
(cd "$work/ringdisk" && dpkg-buildpackage --build=binary --no-sign --no-check-builddeps) >&2
package=ringdisk_${version}-1_amd64.deb
# root may build it too.
lintian --allow-root --fail-on error "$work/$package" >&2
cp "$work/$package" "$folder/"
echo "$folder/$package"
