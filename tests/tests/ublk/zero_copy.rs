//! Zero copy, where the kernel has it: data that is not a file's bytes, requests whose pages the driver could not
//! register, and which requests go which way, as the server itself counts them.

use super::{run, said};
use lab::{Error, Kernel, Outcome, Scratch};

/// Every kind of extent, read and written by pages alone; the judge is the same image read by QEMU's tools.
const CONTENT: &str = r#"
modprobe ext4 || true
# counts NAME: what went which way.
counts() { ringdisk ublk info 0 --json | sed "s/^/counts $1 /"; }
# written OFFSET KIB: the same bytes at the same place of the device and of the raw copy, by requests of that size.
written() {
    dd if=noise of=/dev/ublkb0 bs=$2k count=1 seek=$1 oflag=direct,seek_bytes status=none
    dd if=noise of=copy.raw bs=$2k count=1 seek=$1 oflag=seek_bytes conv=notrunc status=none
}
read_back() {
    for size in 4k 20k 68k 1M; do
        dd if=/dev/ublkb0 bs=$size iflag=direct status=none >device.raw
        cmp device.raw copy.raw && echo "read $1 $size"
    done
    rm device.raw
}
head -c 1M /dev/urandom >noise
# Data, text, zeros and holes in turn, of lengths that are no clusters.
: >source.raw
for turn in 1 2 3; do
    head -c 1300k /dev/urandom >>source.raw
    yes "text $turn" | head -c 2100k >>source.raw
    head -c 700k /dev/zero >>source.raw
    truncate -s $((turn * 7))M source.raw
done
truncate -s 24M source.raw
for kind in compressed zstd plain; do
    case $kind in
    compressed) qemu-img convert -c -O qcow2 source.raw base.qcow2 ;;
    zstd) qemu-img convert -c -O qcow2 -o compression_type=zstd source.raw base.qcow2 ;;
    plain) qemu-img convert -O qcow2 -o cluster_size=128k source.raw base.qcow2 ;;
    esac
    # The overlay is longer than what is behind it, which is no multiple of its clusters.
    qemu-img create -q -f qcow2 -F qcow2 -b base.qcow2 top.qcow2 26M
    cp source.raw copy.raw
    truncate -s 26M copy.raw
    add content add --disk path=top.qcow2,backing_files=on --transport zero-copy --json
    sed 's/^/made /' content.out
    read_back "$kind"
    for place in "0 4" "65536 64" "1300480 12" "4194304 1024" "9437696 36" "15728640 256" "25165824 128" "26214400 4"; do
        written $place
    done
    read_back "$kind"
    counts $kind
    kill $server
    wait $server && echo "stopped $kind" || { cat content.err; exit 1; }
    check top.qcow2
    qemu-img compare -q -f raw -F qcow2 copy.raw top.qcow2 && echo "same $kind"
    rm top.qcow2 base.qcow2 copy.raw
done

# A read-only disk.
qemu-img convert -c -O qcow2 source.raw ro.qcow2
cp source.raw copy.raw
add content add --disk path=ro.qcow2,readonly=on --transport zero-copy
read_back read-only
kill $server
wait $server
rm copy.raw ro.qcow2 source.raw

# Images on a disk, past the page cache: what is not aligned as that disk wants it goes through memory of ours.
for disk in path=/var/tmp/d.qcow2 path=/var/tmp/d.raw,image_type=raw; do
    case $disk in
    *raw) truncate -s 32M /var/tmp/d.raw ;;
    *) ringdisk image create /var/tmp/d.qcow2 32M >/dev/null ;;
    esac
    add content add --disk $disk,direct=on --transport zero-copy
    verify /dev/ublkb0 --bsrange=512-128k --blockalign=512 --size=8m
    counts direct
    kept /dev/ublkb0 kept.raw
    kill $server
    wait $server
    case $disk in
    *raw) image=/var/tmp/d.raw ;;
    *) image=/var/tmp/d.qcow2; check $image ;;
    esac
    same kept.raw $image direct
    rm $image
done

# By size, both ways on one device and within one file.
ringdisk image create q.qcow2 64M >/dev/null
add content add --disk path=q.qcow2,num_queues=2 --queues-per-worker 2 --zero-copy-from 64K --json
sed 's/^/made /' content.out
verify /dev/ublkb0 --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split --offset_increment=24m
counts auto
ringdisk ublk info 0 | sed 's/^/info /'
kill $server
wait $server
check q.qcow2

# More tags than places: the driver says which requests have none.
for each in 1 2; do
    rm q.qcow2
    ringdisk image create q.qcow2 64M >/dev/null
    add content add --disk path=q.qcow2,num_queues=2,queue_size=16 --queues-per-worker $each --transport zero-copy \
        --registered-buffers 5
    verify /dev/ublkb0 --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split --offset_increment=24m
    counts fallback-$each
    kept /dev/ublkb0 kept.raw
    kill $server
    wait $server && echo "stopped fallback"
    check q.qcow2
    same kept.raw q.qcow2 fallback
done

# A file system, by pages alone.
rm q.qcow2
ringdisk image create -o cluster_size=16k q.qcow2 300M >/dev/null
add content add --disk path=q.qcow2,num_queues=2 --transport zero-copy
mkfs.ext4 -q /dev/ublkb0
mount /dev/ublkb0 /run/mnt
fio --name=verified --directory=/run/mnt --size=16m --numjobs=2 --rw=randwrite --bsrange=1k-64k --ioengine=libaio \
    --iodepth=16 --direct=0 --fsync=64 --fallocate=none --verify=xxhash --verify_fatal=1 --do_verify=1 --eta=never \
    --output=/tmp/fio || { cat /tmp/fio; exit 1; }
rm /run/mnt/verified.0.0
fstrim /run/mnt
echo 3 >/proc/sys/vm/drop_caches
(cd / && md5sum /run/mnt/verified* >/tmp/sums)
umount /run/mnt
mount /dev/ublkb0 /run/mnt
(cd / && md5sum -c --quiet /tmp/sums) && echo "sums fine"
umount /run/mnt
counts mounted
ended deleted ringdisk ublk del 0
wait $server && echo "server 0"
check q.qcow2
"#;

/// A number of a line of JSON.
fn number(line: &str, key: &str) -> u64 {
    let key = format!("\"{key}\":");
    let digits = line
        .split(&key)
        .nth(1)
        .and_then(|rest| rest.split([',', '}']).next());
    digits
        .and_then(|digits| digits.parse().ok())
        .unwrap_or_else(|| panic!("no {key} in {line}"))
}

/// Checks by its counts that a server asked for `transport` used it, and no other.
pub(super) fn assert_in_force(transport: &str, outcome: &Outcome) {
    let key = format!("info {transport} ");
    let infos: Vec<&str> = outcome.lines().filter(|line| line.starts_with(&key)).collect();
    assert!(!infos.is_empty(), "no {key}: {}", said(outcome));
    for line in infos {
        let (zero_copied, copied, fallbacks) = ways(line);
        assert!(zero_copied + copied > 0, "{line}");
        let unused = if transport == "zero-copy" {
            copied
        } else {
            zero_copied
        };
        assert_eq!((unused, fallbacks), (0, 0), "{line}");
    }
}

/// Requests by zero copy, by copies, and those of the latter whose pages could not be registered.
fn ways(line: &str) -> (u64, u64, u64) {
    let get = |key| number(line, key);
    (get("zero_copied"), get("copied"), get("fallbacks"))
}

#[test]
fn pages_of_requests_hold_what_is_no_files_bytes_and_small_or_unregistered_ones_are_copied()
-> Result<(), Error> {
    let Some(lab) = lab::require_kernel(Kernel::V7) else {
        return Ok(());
    };
    let scratch = Scratch::new()?;
    let outcome = run(&lab, &scratch, CONTENT)?;
    let all = said(&outcome);
    let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
    assert_eq!(count("made "), 4, "{all}");
    let in_force = r#""transport":"zero-copy""#;
    let mut made = outcome.lines().filter(|line| line.starts_with("made "));
    assert!(made.all(|line| line.contains(in_force)), "{all}");
    for kind in ["compressed", "zstd", "plain"] {
        assert_eq!(count(&format!("read {kind} ")), 8, "{kind}: {all}");
        assert_eq!(count(&format!("stopped {kind}")), 1, "{kind}: {all}");
        assert_eq!(count(&format!("same {kind}")), 1, "{kind}: {all}");
    }
    assert_eq!(count("read read-only "), 4, "{all}");
    assert_eq!(
        (count("stopped fallback"), count("same fallback")),
        (2, 2),
        "{all}"
    );
    assert_eq!(count("same direct"), 2, "{all}");
    assert_eq!((count("sums fine"), count("server 0")), (1, 1), "{all}");
    assert_eq!(count("flawless "), 8, "{all}");
    let counted = |name: &str| {
        let key = format!("counts {name} ");
        let line = outcome.lines().find(|line| line.starts_with(&key));
        ways(line.unwrap_or_else(|| panic!("no {key}: {all}")))
    };
    for name in ["compressed", "zstd", "plain", "direct", "mounted"] {
        let (zero_copied, copied, fallbacks) = counted(name);
        assert!(zero_copied > 0 && copied == 0 && fallbacks == 0, "{name}: {all}");
    }
    let (zero_copied, copied, fallbacks) = counted("auto");
    assert!(zero_copied > 0 && copied > 0 && fallbacks == 0, "{all}");
    for name in ["fallback-1", "fallback-2"] {
        let (zero_copied, copied, fallbacks) = counted(name);
        assert!(
            zero_copied > 0 && copied > 0 && fallbacks == copied,
            "{name}: {all}"
        );
    }
    assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    Ok(())
}
