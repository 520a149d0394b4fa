#!/usr/bin/env bash
# Prepares the lab: the tools on this machine, and what a guest is made of.
#
#   tests/setup.sh            install and build what is missing (root, Debian 12); else return at once
#   tests/setup.sh --tools    install what is missing on this machine, and build nothing
#   tests/setup.sh --where    print the folder of the prepared guest; fail if there is none
#   tests/setup.sh --newer    print the folder of the newer kernel; fail with 3 and why if it could not be had here
#
# The guest is one folder in the cache, named after a hash of its recipe (this file and tests/guest/):
#
#   vmlinuz         Debian's cloud kernel, drawn from a newer suite and never installed here
#   initramfs.cpio  busybox and virtio_blk: finds the root disk, switches to it
#   base.qcow2      the root file system, read-only: guests write to overlays of it
#   kernel-version  the version of the above
#
# A second folder, named in the same way, holds a newer kernel for the same root: vmlinuz, kernel-version and an
# initramfs.cpio that brings the kernel's modules along. Where it cannot be downloaded, a file beside it says why. What is needed to boot from
# a disk with EFI is in its efi/, or efi.unavailable says why not: CLOUDHV.fd (EDK II for Cloud Hypervisor), BOOTX64.EFI (shim) and grubx64.efi.
#
# The folder is built aside and renamed when complete, under a lock: two users at once are safe, a
# build that was interrupted leaves nothing that looks finished. Remove the cache to draw a newer kernel.
# RINGDISK_LAB_CACHE moves the cache; the default is ~/.cache/ringdisk-lab.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CACHE=${RINGDISK_LAB_CACHE:-${HOME:?HOME is not set; set RINGDISK_LAB_CACHE}/.cache/ringdisk-lab}
ROOT_SUITE=bookworm
KERNEL_SUITE=trixie
NEWER_SUITES="forky sid"
NEWER_MAJOR=7
NEWER_MODULES="ublk_drv nbd xfs loop dm-log-writes brd"
ROOT_PACKAGES=busybox-static,e2fsprogs,fio,kmod,lvm2,qemu-utils,util-linux,xfsprogs
ROOT_BYTES=2G
QEMU_MAJOR=10
PATH=$PATH:/usr/sbin:/sbin

say() { echo "setup: $*" >&2; }
die() {
    say "$*"
    exit 1
}

recipe_hash() {
    cat "$HERE/setup.sh" "$HERE/guest/init" "$HERE/guest/lab-init" | sha256sum | cut -c1-16
}

guest_folder() { echo "$CACHE/guest-$(recipe_hash)"; }

newer_folder() { echo "$CACHE/newer-$(recipe_hash)"; }

# --- the tools of this machine --------------------------------------------------------------------

has() { command -v "$1" >/dev/null; }

qemu_is_new_enough() {
    local tool version
    for tool in qemu-system-x86_64 qemu-img qemu-io qemu-storage-daemon; do
        has "$tool" || return 1
    done
    for tool in qemu-system-x86_64 qemu-img; do
        version=$("$tool" --version | sed -nE '1s/.* version ([0-9]+)\..*/\1/p')
        [ "${version:-0}" -ge "$QEMU_MAJOR" ] || return 1
    done
}

missing_packages() {
    local pair
    busybox_is_static || echo busybox-static
    for pair in fio:fio debootstrap:debootstrap mke2fs:e2fsprogs cpio:cpio xz:xz-utils depmod:kmod gcc:gcc \
        dpkg-deb:dpkg setpriv:util-linux udevadm:udev systemd-analyze:systemd valgrind:valgrind \
        cryptsetup:cryptsetup-bin sfdisk:fdisk mkfs.vfat:dosfstools mcopy:mtools; do
        has "${pair%%:*}" || echo "${pair##*:}"
    done
}

busybox_is_static() { has busybox && ! ldd "$(command -v busybox)" >/dev/null 2>&1; }

apt() { apt-get -q -y -o DPkg::Lock::Timeout=600 "$@" >&2; }

# Prints `URI KEYRING` of the mirror this machine already uses for $ROOT_SUITE (KEYRING may be empty).
mirror() {
    local file found
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -e "$file" ] || continue
        found=$(awk -v suite="$ROOT_SUITE" -v RS= '
            {
                uri = key = suites = ""
                count = split($0, line, "\n")
                for (i = 1; i <= count; i++) {
                    split(line[i], word, /[ \t]+/)
                    if (word[1] == "URIs:") uri = word[2]
                    if (word[1] == "Signed-By:") key = word[2]
                    if (word[1] == "Suites:") suites = substr(line[i], 8) " "
                }
                if (uri != "" && index(suites, " " suite " ")) { print uri, key; exit }
            }' "$file")
        [ -z "$found" ] || { echo "$found"; return; }
    done
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -e "$file" ] || continue
        found=$(sed -nE "s/^deb[ \t]+(\[[^]]*\][ \t]+)?([^ \t]+)[ \t]+$ROOT_SUITE[ \t].*/\2/p" "$file" | head -n 1)
        [ -z "$found" ] || { echo "$found"; return; }
    done
    die "no apt source offers the suite $ROOT_SUITE; the lab needs Debian 12's"
}

# Writes a source for one suite of the machine's own mirror: write_source FILE SUITE
write_source() {
    local uri keyring
    read -r uri keyring <<<"$(mirror)"
    {
        echo "Types: deb"
        echo "URIs: $uri"
        echo "Suites: $2"
        echo "Components: main"
        [ -z "$keyring" ] || echo "Signed-By: $keyring"
    } >"$1"
}

install_tools() {
    local missing
    missing=$(missing_packages)
    if [ -z "$missing" ] && qemu_is_new_enough; then return; fi
    [ "$(id -u)" = 0 ] || die "missing: ${missing:-} qemu $QEMU_MAJOR; run tests/setup.sh as root to install them"
    has apt-get || die "missing: ${missing:-} qemu $QEMU_MAJOR; this machine has no apt-get, install them by hand"
    export DEBIAN_FRONTEND=noninteractive
    exec 8>/run/lock/ringdisk-lab-apt.lock
    flock 8
    if ! qemu_is_new_enough; then
        if ! apt-cache policy | grep -q "n=$ROOT_SUITE-backports"; then
            write_source /etc/apt/sources.list.d/ringdisk-lab.sources "$ROOT_SUITE-backports"
            printf 'Package: *\nPin: release n=%s-backports\nPin-Priority: 100\n' "$ROOT_SUITE" \
                >/etc/apt/preferences.d/ringdisk-lab
        fi
        say "installing QEMU from $ROOT_SUITE-backports"
        apt update
        apt install --no-install-recommends -t "$ROOT_SUITE-backports" qemu-system-x86 qemu-system-common qemu-utils
        missing=$(missing_packages)
    fi
    if [ -n "$missing" ]; then
        say "installing" $missing
        apt update
        apt install --no-install-recommends $missing
    fi
    qemu_is_new_enough || die "QEMU is still older than $QEMU_MAJOR, or a tool of it is missing"
    missing=$(missing_packages)
    [ -z "$missing" ] || die "still missing after installing:" $missing
    exec 8>&-
}

# --- the guest ------------------------------------------------------------------------------------

# Opens the suite $2 to an apt state of its own, inside $1, with these options: nothing else on this machine can ever be drawn from there.
options=()
open_suite() {
    local state=$1/apt
    rm -rf "$state"
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
    write_source "$state/suite.sources" "$2"
    options=(-o "Dir::Etc::sourcelist=$state/suite.sources" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::Etc::preferencesparts=/dev/null -o "Dir::State::lists=$state/lists" -o "Dir::Cache=$state/cache"
        -o Dir::State::status=/dev/null -o APT::Sandbox::User=root -o APT::Get::List-Cleanup=0)
    apt-get -q "${options[@]}" --error-on=any update >&2
}

# Unpacks packages of the open suite into a new folder: unpack FOLDER PACKAGE…
unpack() {
    local folder=$1 file
    rm -rf "$folder" "$folder.packages"
    mkdir -p "$folder" "$folder.packages"
    (cd "$folder.packages" && apt-get -q "${options[@]}" download "${@:2}" >&2) || return
    for file in "$folder.packages"/*.deb; do
        dpkg-deb -x "$file" "$folder" || return
    done
}

# Unpacks the cloud kernel of suite $2 into $1/kernel. The meta package names the kernel; newer suites
# have it split, and the package it names is empty but for what it depends on.
fetch_kernel() {
    local work=$1 suite=$2 package parts
    open_suite "$work" "$suite" || return
    package=$(apt-cache "${options[@]}" show linux-image-cloud-amd64 |
        sed -nE 's/^Depends:.*(linux-image-[0-9][^ ,]*).*/\1/p' | head -n 1)
    [ -n "$package" ] || { say "$suite has no linux-image-cloud-amd64 that names a kernel"; return 1; }
    parts=$(apt-cache "${options[@]}" show "$package" | sed -n 's/^Depends://p' | tr ',|' '\n' |
        sed -nE 's/^ *(linux-(base|binary|modules)-[0-9][^ ]*).*/\1/p' | sort -u)
    say "unpacking $package of $suite"
    # shellcheck disable=SC2086 # a list
    unpack "$work/kernel" "$package" $parts || return
    # An unmerged /lib in the package, a merged one in the guest.
    if [ -d "$work/kernel/lib/modules" ]; then
        mkdir -p "$work/kernel/usr/lib"
        mv "$work/kernel/lib/modules" "$work/kernel/usr/lib/modules" || return
    fi
}

# Prints the kernel image that fetch_kernel unpacked: kernel_image WORK VERSION
kernel_image() {
    local file
    for file in "$1/kernel/boot/vmlinuz-$2" "$1/kernel/usr/lib/modules/$2/vmlinuz"; do
        [ -e "$file" ] && { echo "$file"; return; }
    done
    say "there is no kernel image of $2 in what was downloaded"
    return 1
}

# Prints the files of a module and of all it needs, in the order to load them: module_files TREE VERSION NAME
module_files() { modprobe -d "$1" -S "$2" --show-depends --ignore-install "$3" | awk '$1 == "insmod" { print $2 }'; }

# build_initramfs WORK TREE-WITH-MODULES VERSION OUT [A-FOLDER-THAT-BECOMES-/lab-modules]
build_initramfs() {
    local work=$1 modules=$2 version=$3 out=$4 extra=${5:-} file plain
    local tree=$work/initramfs
    mkdir -p "$tree"/{bin,dev,proc,sys,run,newroot,modules}
    cp "$(command -v busybox)" "$tree/bin/busybox"
    cp "$HERE/guest/init" "$tree/init"
    chmod 755 "$tree/init" "$tree/bin/busybox"
    [ -z "$extra" ] || cp -r "$extra" "$tree/lab-modules"
    for file in $(module_files "$modules" "$version" virtio_blk); do
        plain=$(basename "$file" .xz)
        case $file in
        *.xz) xz -dc "$file" >"$tree/modules/$plain" ;;
        *) cp "$file" "$tree/modules/$plain" ;;
        esac
        echo "$plain" >>"$tree/modules/order"
    done
    [ -s "$tree/modules/order" ] || die "the kernel $version has no module virtio_blk"
    (cd "$tree" && find . | LC_ALL=C sort | cpio -o -H newc --quiet) >"$out"
}

build_guest() {
    local target=$1 version uri keyring
    local work=$CACHE/building
    rm -rf "$work"
    mkdir -p "$work/out"
    fetch_kernel "$work" "$KERNEL_SUITE" || die "cannot get the guest's kernel of $KERNEL_SUITE"
    version=$(ls "$work/kernel/usr/lib/modules")
    cp "$(kernel_image "$work" "$version")" "$work/out/vmlinuz"
    echo "$version" >"$work/out/kernel-version"

    read -r uri keyring <<<"$(mirror)"
    say "building the root file system (a minute or two)"
    debootstrap ${keyring:+--keyring="$keyring"} --variant=minbase --include="$ROOT_PACKAGES" \
        "$ROOT_SUITE" "$work/root" "$uri" >"$work/debootstrap.log" 2>&1 ||
        { tail -n 20 "$work/debootstrap.log" >&2; die "debootstrap failed; its log is $work/debootstrap.log"; }
    rm -rf "$work/root"/var/cache/apt/* "$work/root"/var/lib/apt/lists/* "$work/root"/usr/share/{doc,man,locale}/*
    mkdir -p "$work/root/usr/lib/modules"
    cp -r "$work/kernel/usr/lib/modules/$version" "$work/root/usr/lib/modules/"
    depmod -b "$work/root" "$version"
    install -m 755 "$HERE/guest/lab-init" "$work/root/sbin/lab-init"
    echo lab >"$work/root/etc/hostname"
    : >"$work/root/etc/fstab"

    build_initramfs "$work" "$work/root" "$version" "$work/out/initramfs.cpio"
    mke2fs -q -t ext4 -L lab-root -d "$work/root" "$work/root.ext4" "$ROOT_BYTES" >&2
    qemu-img convert -f raw -O qcow2 "$work/root.ext4" "$work/out/base.qcow2"
    qemu-img check -q "$work/out/base.qcow2"
    chmod 444 "$work/out"/*
    mv -T "$work/out" "$target"
    rm -rf "$work"
    say "the guest is ready: $target (kernel $version)"
}

# Puts firmware, shim and GRUB of the open suite into $1/out/efi.
fetch_efi() {
    local from=$1/efi to=$1/out/efi
    say "unpacking firmware and boot loaders"
    unpack "$from" cloudhv-efi-x86-64 shim-signed grub-efi-amd64-signed || return
    mkdir -p "$to"
    cp "$from/usr/share/cloudhv-efi-x86-64/CLOUDHV.fd" "$to/" || return
    cp "$from/usr/lib/shim/shimx64.efi.signed" "$to/BOOTX64.EFI" || return
    cp "$from/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed" "$to/grubx64.efi"
}

# Builds the newer kernel's folder from suite $2, or returns with the reason on standard error.
build_newer() {
    local target=$1 suite=$2 version name file extra
    local work=$CACHE/building-newer
    rm -rf "$work"
    mkdir -p "$work/out"
    fetch_kernel "$work" "$suite" || return
    version=$(ls "$work/kernel/usr/lib/modules")
    case $version in
    "$NEWER_MAJOR".*) ;;
    *) say "$suite has kernel $version, not $NEWER_MAJOR.x"; return 1 ;;
    esac
    cp "$(kernel_image "$work" "$version")" "$work/out/vmlinuz" || return
    echo "$version" >"$work/out/kernel-version"
    # Where the tools for modules look.
    ln -s usr/lib "$work/kernel/lib"
    depmod -b "$work/kernel" "$version" || return
    # Only what tests need: it travels in memory.
    extra=$work/extra/lib/modules/$version
    mkdir -p "$extra"
    for name in $NEWER_MODULES; do
        for file in $(module_files "$work/kernel" "$version" "$name"); do
            file=${file#*/modules/"$version"/}
            mkdir -p "$extra/$(dirname "$file")"
            cp "$work/kernel/usr/lib/modules/$version/$file" "$extra/$file" || return
        done
        find "$extra" -name "$name.ko*" | grep -q . || { say "the kernel $version has no module $name"; return 1; }
    done
    cp "$work/kernel/usr/lib/modules/$version"/modules.{builtin,builtin.modinfo,order} \
        "$extra/" || return
    depmod -b "$work/extra" "$version" || return
    build_initramfs "$work" "$work/kernel" "$version" "$work/out/initramfs.cpio" "$work/extra/lib/modules" || return
    fetch_efi "$work" || {
        rm -rf "$work/out/efi"
        echo "Debian's $suite did not have it when the lab was set up" >"$work/out/efi.unavailable"
        say "WARNING: no firmware and boot loaders from $suite"
    }
    find "$work/out" -type f -exec chmod 444 {} +
    mv -T "$work/out" "$target" || return
    rm -rf "$work"
    say "the newer kernel is ready: $target (kernel $version of $suite)"
}

# The tests that need the newer kernel say that they cannot run where it cannot be had; the next setup tries again.
prepare_newer() {
    local target suite said
    target=$(newer_folder)
    [ -d "$target" ] && return
    [ "$(id -u)" = 0 ] || die "the lab's newer kernel is not there; run tests/setup.sh as root (RINGDISK_LAB_CACHE=$CACHE)"
    mkdir -p "$CACHE"
    exec 9>"$CACHE/lock-newer"
    flock 9
    said=$CACHE/newer.log
    : >"$said"
    for suite in $NEWER_SUITES; do
        [ -d "$target" ] || build_newer "$target" "$suite" 2>>"$said" || say "no newer kernel from $suite; see $said"
    done
    if [ -d "$target" ]; then
        rm -f "$target.unavailable"
    else
        echo "no kernel $NEWER_MAJOR.x could be had from Debian's $NEWER_SUITES: $(grep -E '^(E:|setup:)' "$said" | tail -n 1)" \
            >"$target.unavailable"
        say "WARNING: $(cat "$target.unavailable")"
    fi
    exec 9>&-
}

prepare_guest() {
    local target
    target=$(guest_folder)
    [ -d "$target" ] && return
    [ "$(id -u)" = 0 ] || die "the lab's guest is not built; run tests/setup.sh as root (RINGDISK_LAB_CACHE=$CACHE)"
    mkdir -p "$CACHE"
    exec 9>"$CACHE/lock"
    flock 9
    [ -d "$target" ] || build_guest "$target"
    exec 9>&-
}

case ${1:-} in
"")
    install_tools
    # Side by side: each waits for the mirror more than for a CPU.
    prepare_guest &
    guest=$!
    prepare_newer &
    status=0
    wait "$guest" || status=1
    wait $! || status=1
    exit "$status"
    ;;
--tools) install_tools ;;
--where)
    folder=$(guest_folder)
    [ -d "$folder" ] || die "the lab's guest is not built ($folder); run tests/setup.sh as root"
    echo "$folder"
    ;;
--newer)
    folder=$(newer_folder)
    if [ -d "$folder" ]; then
        echo "$folder"
    elif [ -e "$folder.unavailable" ]; then
        cat "$folder.unavailable"
        exit 3
    else
        die "the lab's newer kernel is not there ($folder); run tests/setup.sh as root"
    fi
    ;;
*) die "usage: tests/setup.sh [--tools|--where|--newer]" ;;
esac
