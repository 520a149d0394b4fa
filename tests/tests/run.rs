//! `ringdisk run` where KVM is real: in an emulated guest whose processor has AMD's extensions. The machine it runs
//! boots the lab's Linux from an overlay through our own virtio-pci; QEMU's tools judge what is left.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::nested::{Nested, Toolbox};
use lab::{Error, Lab, Outcome, Scratch, image};

#[path = "run/foreign.rs"]
mod foreign;

const MIB: u64 = 1 << 20;

/// What every outer script begins with. `run SCRIPT ARGUMENTS…` runs a machine whose console goes to `SCRIPT.log`.
const OUTER: &str = r#"
mount /dev/lab/tools /mnt
cd /mnt
./ringdisk image create -o backing_file=/dev/lab/base,backing_fmt=raw root.qcow2 >/dev/null
./ringdisk image create -o cluster_size=16k data.qcow2 192M >/dev/null
run() {
    script=$1
    shift
    ./ringdisk --log info run --kernel "${KERNEL:-vmlinuz}" --initramfs "$script" --cpus "${CPUS:-2}" \
        --memory "${MEMORY:-512M}" --serial "file=$script.log" \
        --cmdline "console=ttyS0 loglevel=5 panic=1 lab.root=0000:00:01.0 lab.disk=data@0000:00:02.0 lab.disk=frozen@0000:00:03.0" \
        --disk path=root.qcow2,num_queues=2,backing_files=on --disk "${data:-path=data.qcow2,num_queues=2,serial=DATA}" "$@" 2>"$script.err"
}
told() {
    tr -d '\r' <"$1.log" | sed 's/^/inner /'
    sed 's/\x1b\[[0-9;]*m//g; s/^/err /' "$1.err"
}
"#;

/// Runs `script` in the outer guest, with `inner` to be run by machines. Gives what was said, and the outer guest's
/// disk as a raw image with an ext4 file system.
fn nested(
    lab: &Lab,
    scratch: &Scratch,
    inner: &[(&str, &str)],
    script: &str,
) -> Result<(Outcome, PathBuf), Error> {
    let toolbox = Toolbox::new(lab, scratch)?;
    nested_with(lab, scratch, toolbox, inner, script)
}

/// As [`nested`], with a toolbox that holds more.
fn nested_with(
    lab: &Lab,
    scratch: &Scratch,
    mut toolbox: Toolbox,
    inner: &[(&str, &str)],
    script: &str,
) -> Result<(Outcome, PathBuf), Error> {
    for (name, script) in inner {
        toolbox = toolbox.script(lab, name, script)?;
    }
    let script = format!("{OUTER}{script}");
    let nested = Nested {
        lab,
        scratch,
        toolbox: &toolbox,
        bytes: 512 * MIB,
        script: &script,
        patience: Duration::from_secs(400),
    };
    nested.run()
}

/// Takes a file out of the outer guest's disk.
fn take(scratch: &Scratch, tools: &Path, name: &str) -> Result<PathBuf, Error> {
    let target = scratch.file(name);
    image::extract(tools, &format!("/{name}"), &target)?;
    Ok(target)
}

/// What the inner guest said on its console.
fn inner(outcome: &Outcome) -> Vec<&str> {
    outcome
        .lines()
        .filter_map(|line| line.strip_prefix("inner "))
        .collect()
}

const WORK: &str = r#"
for disk in data frozen; do
    name=$(basename "$(readlink /dev/lab/$disk)")
    echo "disk $disk $(cat /sys/block/$name/size) ro=$(cat /sys/block/$name/ro) serial=$(cat /sys/block/$name/serial)"
done
if [ ! -e /root/sums ]; then
    head -c 4096 /dev/lab/frozen | sha256sum | sed 's/^/frozen /'
    dd if=/dev/zero of=/dev/lab/frozen bs=4k count=1 2>/dev/null && echo "a read-only disk was written"
    mkfs.ext4 -q /dev/lab/data
    mount /dev/lab/data /mnt
    fio --name=verified --directory=/mnt --size=8m --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split \
        --rw=randwrite --bsrange=4k-64k --ioengine=libaio --iodepth=16 --direct=1 --fsync=64 --fallocate=none \
        --verify=xxhash --verify_fatal=1 --do_verify=1 --randseed=7 --eta=never --output=/tmp/fio || { cat /tmp/fio; exit 1; }
    dd if=/dev/urandom of=/srv/kept bs=64k count=16 conv=fsync status=none
    sha256sum /mnt/verified* /srv/kept >/root/sums
    sync
    fstrim -v /mnt | sed 's/^/trimmed /'
    umount /mnt
    lab-reboot
    exit
fi
mount /dev/lab/data /mnt
sha256sum -c /root/sums
umount /mnt
e2fsck -fn /dev/lab/data
name=$(basename "$(readlink -f "/sys/block/$(basename "$(readlink /dev/lab/data)")/device")")
for queue in 0 1; do
    awk -v queue="$name-req.$queue" '$NF == queue { print "interrupts", $2 + $3 }' /proc/interrupts
done
sha256sum /dev/lab/data | sed 's/^/data /'
"#;

#[test]
fn a_machine_boots_from_an_overlay_works_restarts_and_switches_itself_off() -> Result<(), Error> {
    work_twice("", "", [6, 0])
}

/// After the guest's restart the machine connects to the same server again.
#[test]
fn a_machine_works_with_a_disk_that_our_own_server_serves() -> Result<(), Error> {
    let before = r#"
./ringdisk vhost-user --socket data.sock --disk path=data.qcow2,num_queues=2,serial=DATA & server=$!
tries=0
until [ -S data.sock ]; do
    tries=$((tries + 1)); [ $tries -lt 100 ] || exit 1
    sleep 0.1
done
data=vhost_user=on,socket=data.sock,num_queues=2
"#;
    let after = r#"
kill $server
wait $server && echo "served 0" || echo "served $?"
"#;
    work_twice(before, after, [4, 2])
}

/// A machine with three disks works, restarts, works again and ends. `drivers` says how many disks it was told of that
/// io_uring carries out the I/O of, or another program.
fn work_twice(before: &str, after: &str, drivers: [usize; 2]) -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let script = r#"
./ringdisk image create frozen.qcow2 16M >/dev/null
./ringdisk io --disk path=frozen.qcow2 -c "write -P 7 0 1M" >/dev/null
run work --disk path=frozen.qcow2,readonly=on && echo "ended 0" || echo "ended $?"
told work
"#;
    let script = format!("{before}{script}{after}");
    let (outcome, tools) = nested(&lab, &scratch, &[("work", WORK)], &script)?;
    let said = inner(&outcome);
    let all = said.join("\n");
    let count = |wanted: &str| said.iter().filter(|line| line.contains(wanted)).count();
    assert_eq!(outcome.value("ended "), Some("0"), "{all}");
    assert_eq!(
        count("@@exit 0"),
        2,
        "it worked, and again after its restart: {all}"
    );
    assert_eq!(count("disk data 393216 ro=0 serial=DATA"), 2, "{all}");
    assert_eq!(count("disk frozen 32768 ro=1 serial="), 2, "{all}");
    let sevens = scratch.file("sevens");
    std::fs::write(&sevens, [7; 4096]).map_err(|source| Error::File {
        action: "write",
        path: sevens.clone(),
        source,
    })?;
    assert_eq!(count(&format!("frozen {}", image::sha256(&sevens)?)), 1, "{all}");
    assert_eq!(count("a read-only disk was written"), 0, "{all}");
    assert_eq!(count(": OK"), 3, "{all}");
    assert_eq!(count("trimmed "), 1, "{all}");
    let busy = said
        .iter()
        .filter_map(|line| line.strip_prefix("interrupts ")?.parse::<u64>().ok());
    assert_eq!(
        busy.filter(|&count| count > 0).count(),
        2,
        "both queues were at work: {all}"
    );

    if !after.is_empty() {
        assert_eq!(outcome.value("served "), Some("0"), "{all}");
    }
    // Three disks, twice.
    let lines = || outcome.lines().filter(|line| line.contains("plugged in"));
    let told_driver = ["io_uring", "vhost-user"].map(|driver| {
        let told = format!("driver=\"{driver}\"");
        lines().filter(|line| line.contains(&told)).count()
    });
    assert_eq!(
        told_driver,
        drivers,
        "what carries out the I/O of each disk is told: {:?}",
        outcome.lines().collect::<Vec<_>>()
    );

    // Kicks and interrupts go past the machine: what comes to it is set-up, however much the disks did.
    let exits: Vec<u64> = outcome
        .lines()
        .filter_map(|line| line.split("memory: ").nth(1)?.split(',').next()?.parse().ok())
        .collect();
    assert_eq!(exits.len(), 2, "{:?}", outcome.lines().collect::<Vec<_>>());
    assert!(
        exits.iter().all(|&count| count < 1000),
        "{exits:?} accesses to registers"
    );

    let data = take(&scratch, &tools, "data.qcow2")?;
    image::check_flawless(&data)?;
    let raw = data.with_extension("raw");
    image::convert(&data, &raw, "raw")?;
    let guests = said
        .iter()
        .find_map(|line| line.strip_prefix("data ")?.split(' ').next());
    assert_eq!(
        guests,
        Some(image::sha256(&raw)?.as_str()),
        "QEMU reads what the guest read"
    );
    Ok(())
}

const VERIFY: &str = r#"
mkfs.ext4 -q /dev/lab/data
mount -o noatime /dev/lab/data /mnt
echo ready
for round in 1 2 3 4 5 6; do
    fio --name=verified --directory=/mnt --size=8m --numjobs=2 --rw=randwrite --bsrange=4k-64k --ioengine=libaio --iodepth=16 \
        --direct=1 --fsync=64 --fallocate=none --verify=xxhash --verify_fatal=1 --do_verify=1 --randseed=$round --eta=never \
        --output=/tmp/fio || { cat /tmp/fio; exit 1; }
done
umount /mnt
e2fsck -fn /dev/lab/data
"#;

#[test]
fn a_server_that_is_killed_under_a_running_machine_is_followed_by_another() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let script = r#"
serve() { ./ringdisk vhost-user --restartable --socket data.sock --disk path=data.qcow2,num_queues=2 & server=$!; }
serve
tries=0
until [ -S data.sock ]; do
    tries=$((tries + 1)); [ $tries -lt 100 ] || exit 1
    sleep 0.1
done
./ringdisk image create frozen.qcow2 16M >/dev/null
data=vhost_user=on,socket=data.sock,num_queues=2
run verify --disk path=frozen.qcow2,readonly=on & machine=$!
tries=0
until grep -q ready verify.log 2>/dev/null; do
    tries=$((tries + 1)); [ $tries -lt 900 ] || { told verify; exit 1; }
    sleep 0.2
done
for kill in 1 2 3; do
    sleep 1
    kill -9 $server
    wait $server || true
    serve
done
wait $machine && echo "ended 0" || echo "ended $?"
kill $server
wait $server && echo "served 0" || echo "served $?"
told verify
"#;
    let (outcome, tools) = nested(&lab, &scratch, &[("verify", VERIFY)], script)?;
    let all = outcome.lines().collect::<Vec<_>>().join("\n");
    assert_eq!(outcome.value("ended "), Some("0"), "{all}");
    assert_eq!(outcome.value("served "), Some("0"), "{all}");
    assert!(all.contains("inner @@exit 0"), "{all}");
    let again = outcome
        .lines()
        .filter(|line| line.contains("connected to the vhost-user backend again"));
    assert_eq!(again.count(), 3, "{all}");
    image::check_sound(&take(&scratch, &tools, "data.qcow2")?)?;
    Ok(())
}

const LOAD: &str = r#"
mount -o noatime /dev/lab/data /mnt 2>/dev/null || { mkfs.ext4 -q /dev/lab/data; mount /dev/lab/data /mnt; }
if [ -e /mnt/kept ]; then
    sha256sum -c /mnt/sums
    umount /mnt
    e2fsck -fn /dev/lab/data
    exit
fi
dd if=/dev/urandom of=/mnt/kept bs=64k count=16 conv=fsync status=none
(cd / && sha256sum /mnt/kept >/mnt/sums)
sync
echo ready
fio --name=load --directory=/mnt --size=32m --rw=randrw --bsrange=4k-64k --ioengine=libaio --iodepth=16 --direct=1 \
    --fsync=16 --time_based --runtime=60 --eta=never --output=/tmp/fio
"#;

#[test]
fn a_machine_that_is_killed_under_load_leaves_images_that_boot_again() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let script = r#"
run load & machine=$!
tries=0
until grep -q ready load.log 2>/dev/null; do
    tries=$((tries + 1)); [ $tries -lt 600 ] || { told load; exit 1; }
    sleep 0.2
done
sleep 3
for process in /proc/[0-9]*; do
    [ "$(readlink $process/exe)" != /mnt/ringdisk ] || kill -9 "${process#/proc/}"
done
wait $machine || true
./ringdisk image check data.qcow2 | sed 's/^/check /' || true
run load && echo "ended 0" || echo "ended $?"
told load
"#;
    let (outcome, tools) = nested(&lab, &scratch, &[("load", LOAD)], script)?;
    let all = inner(&outcome).join("\n");
    assert_eq!(outcome.value("ended "), Some("0"), "{all}");
    assert!(all.contains("/mnt/kept: OK") && all.contains("@@exit 0"), "{all}");
    let errors: Vec<_> = outcome
        .lines()
        .filter(|line| line.starts_with("check ") && line.contains("ERROR"))
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
    image::check_sound(&take(&scratch, &tools, "data.qcow2")?)?;
    Ok(())
}

/// Counts in the first sector, and says so when the disk has answered; until the disk has grown.
const COUNT: &str = r#"
size() { cat "/sys/block/$(basename "$(readlink /dev/lab/data)")/size"; }
before=$(size)
fio --name=load --filename=/dev/lab/data --offset=16m --size=64m --rw=randwrite --bs=16k --ioengine=libaio --iodepth=16 \
    --direct=1 --time_based --runtime=500 --eta=never --output=/tmp/fio &
load=$!
count=0
while [ "$(size)" = "$before" ]; do
    count=$((count + 1))
    printf '%-512s' "$count" | dd of=/dev/lab/data bs=512 count=1 oflag=direct conv=notrunc status=none
    echo "wrote $count"
done
kill $load
echo "size $before $(size)"
dd if=/dev/lab/data bs=1M skip=192 count=1 status=none | tr -d '\0' | wc -c | sed 's/^/behind the old end /'
"#;

#[test]
fn a_paused_machines_image_holds_what_was_answered_and_its_disk_grows_while_it_runs() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let script = r#"
run count --control control & machine=$!
wait_for() {
    tries=0
    until grep -q "$1" count.log 2>/dev/null; do
        tries=$((tries + 1)); [ $tries -lt 900 ] || { told count; exit 1; }
        sleep 0.2
    done
}
ctl() { ./ringdisk ctl --socket control "$@"; }
wait_for "wrote 20"
ctl info | sed 's/^/before /'
ctl pause >/dev/null
grep -o 'wrote [0-9]*' count.log | tail -n 1 | sed 's/^/last /'
ctl info | sed 's/^/paused /'
cp data.qcow2 copy.qcow2
sleep 2
cmp data.qcow2 copy.qcow2 && echo "still yes"
ctl resume >/dev/null
ctl dance 2>&1 | head -n 1 | sed 's/^/unknown /' || true
ctl disk-resize nodisk 1G 2>&1 | sed 's/^/nodisk /' || true
ctl disk-resize data.qcow2 1M 2>&1 | sed 's/^/smaller /' || true
ctl disk-resize data.qcow2 256M | sed 's/^/grown /'
wait $machine && echo "ended 0" || echo "ended $?"
told count
"#;
    let (outcome, tools) = nested(&lab, &scratch, &[("count", COUNT)], script)?;
    let all = outcome.lines().collect::<Vec<_>>().join("\n");
    let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
    assert_eq!(value("ended "), "0", "{all}");
    assert!(value("before ").contains(r#""state":"running""#), "{all}");
    assert!(value("paused ").contains(r#""state":"paused""#), "{all}");
    assert_eq!(
        value("still "),
        "yes",
        "nothing is written while it is paused: {all}"
    );
    assert!(value("unknown ").contains("dance"), "{all}");
    assert!(
        value("nodisk ").contains("there is no disk `nodisk`; there are: root.qcow2, data.qcow2"),
        "{all}"
    );
    assert!(
        value("smaller ").contains("disk data.qcow2 cannot be made 1048576 bytes large"),
        "{all}"
    );
    assert!(value("grown ").contains("268435456"), "{all}");
    assert!(
        all.contains("inner size 393216 524288"),
        "the guest has seen it: {all}"
    );
    assert!(all.contains("inner behind the old end 0"), "{all}");

    let copy = take(&scratch, &tools, "copy.qcow2")?;
    image::check_flawless(&copy)?;
    let raw = copy.with_extension("raw");
    image::convert(&copy, &raw, "raw")?;
    let bytes = std::fs::read(&raw).map_err(|source| Error::File {
        action: "read",
        path: raw.clone(),
        source,
    })?;
    let held: u64 = String::from_utf8_lossy(&bytes[..512])
        .trim()
        .parse()
        .unwrap_or_default();
    let told: u64 = value("last wrote ").parse().unwrap_or(u64::MAX);
    assert!(
        held >= told,
        "the image holds {held}, the guest was told that {told} is written"
    );
    image::check_flawless(&take(&scratch, &tools, "data.qcow2")?)?;
    Ok(())
}

/// Finds the hot-plugged disk by its serial number, and does what `say` tells the outer script that it waits for.
const HOT: &str = r#"
hot() { grep -lx HOT /sys/block/vd*/serial 2>/dev/null | cut -d/ -f4; }
wait_hot() { until disk=$(hot) && [ -n "$disk" ]; do sleep 0.1; done; }
wait_gone() { while [ -n "$(hot)" ]; do sleep 0.1; done; }
address() { basename "$(readlink -f "/sys/block/$disk/device/..")"; }
size() { cat "/sys/block/$disk/size"; }
slots() { ls /sys/bus/pci/slots | sort -n | tr '\n' ' '; }
if [ -e /root/sums ]; then
    # After the restart: the added disk is there from the start, the one that was to go is not.
    wait_hot
    echo "after the restart $disk at $(address), data $(grep -cx DATA /sys/block/vd*/serial | grep -c ':1$')"
    mount /dev/$disk /mnt
    sha256sum -c /root/sums
    umount /mnt
    exit
fi
echo "slots $(slots)"
echo "cpus $(nproc)"
echo "say ready"
wait_hot
echo "found $disk at $(address) $(size)"
mkfs.ext4 -q /dev/$disk
mount /dev/$disk /mnt
fio --name=verified --directory=/mnt --size=8m --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split \
    --rw=randwrite --bsrange=4k-64k --ioengine=libaio --iodepth=16 --direct=1 --fsync=64 --fallocate=none \
    --verify=xxhash --verify_fatal=1 --do_verify=1 --randseed=7 --eta=never --output=/tmp/fio || { cat /tmp/fio; exit 1; }
sha256sum /mnt/verified* >/root/sums
umount /mnt
echo "say unmounted"
wait_gone
echo "say gone"
wait_hot
mount /dev/$disk /mnt
sha256sum -c /root/sums
umount /mnt
before=$(size)
echo "say again"
while [ "$(size)" = "$before" ]; do sleep 0.1; done
echo "grown $before $(size)"
# Under load, and without being asked.
fio --name=load --filename=/dev/$disk --offset=96m --size=64m --rw=randwrite --bs=16k --ioengine=libaio --iodepth=16 \
    --direct=1 --time_based --runtime=500 --eta=never --output=/tmp/fio &
load=$!
sleep 2
slot=$(address); slot=${slot#*:*:}; slot=$((0x${slot%.*}))
echo 0 >/sys/bus/pci/slots/$slot/power
[ -z "$(hot)" ] && echo "let go"
wait $load 2>/dev/null || echo "the load has failed"
echo "say let go"
wait_hot
echo "back $disk at $(address)"
echo "say restart"
until [ -e /run/asked ]; do
    grep -q DATA /sys/block/vd*/serial || touch /run/asked
    sleep 0.1
done
lab-reboot
"#;

/// The kernel is the ELF file inside the lab's, begun by PVH; on four CPUs, in huge pages of one NUMA node.
#[test]
fn disks_are_added_to_a_running_machine_and_removed_from_it() -> Result<(), Error> {
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::File {
            action: "copy",
            path,
            source,
        }
    };
    let bz_image = std::fs::read(lab.kernel()).map_err(failed(lab.kernel()))?;
    let elf = ringdisk_gen::kernel::vmlinux(&bz_image).expect("a kernel compressed with zstd");
    let vmlinux = scratch.file("vmlinux");
    std::fs::write(&vmlinux, elf).map_err(failed(&vmlinux))?;
    let toolbox = Toolbox::new(&lab, &scratch)?.file(&vmlinux)?;
    let script = r#"
./ringdisk image create -o cluster_size=16k hot.qcow2 128M >/dev/null
echo 200 >/proc/sys/vm/nr_hugepages
KERNEL=vmlinux CPUS=4 MEMORY=size=512M,hugepages=on,host_numa_node=0
run few 2>&1 | sed 's/^/few /' || true
sed 's/^/few /' few.err
echo 256 >/proc/sys/vm/nr_hugepages
free() { grep HugePages_Free /proc/meminfo | tr -dc 0-9 | sed "s/.*/pages $1 &/"; echo; }
free before
run hot --control control & machine=$!
wait_for() {
    tries=0
    until grep -q "say $1" hot.log 2>/dev/null; do
        tries=$((tries + 1)); [ $tries -lt 900 ] || { told hot; exit 1; }
        sleep 0.2
    done
}
ctl() { ./ringdisk ctl --socket control "$@"; }
say() { sed "s/^/$1 /"; }
refused() { name=$1; shift; ctl "$@" 2>&1 | say "$name" || true; }
HOT=path=hot.qcow2,id=hot,serial=HOT,num_queues=2
wait_for ready
free while
refused missing disk-add --disk path=missing.qcow2
refused twice disk-add --disk path=data.qcow2,id=other
refused id disk-add --disk path=hot.qcow2,id=data.qcow2
refused queues disk-add --disk path=hot.qcow2,num_queues=5
head -c 1M /dev/zero >zeros
refused corrupt disk-add --disk path=zeros
refused nodisk disk-remove hot
ctl info | say untouched
ctl disk-add --disk "$HOT" | say added
refused again disk-add --disk "$HOT"
wait_for unmounted
ctl pause >/dev/null
refused paused disk-remove hot
ctl info | say asked
ctl resume >/dev/null
wait_for gone
./ringdisk image check hot.qcow2 | say check
./ringdisk io --disk path=hot.qcow2 -c "read 0 4k" >/dev/null && echo "unlocked yes"
ctl disk-add --disk "$HOT" | say added
wait_for again
ctl disk-resize hot 192M | say resized
wait_for "let go"
tries=0
until ./ringdisk io --disk path=hot.qcow2 -c "read 0 4k" >/dev/null 2>&1; do
    tries=$((tries + 1)); [ $tries -lt 50 ] || break
    sleep 0.1
done
./ringdisk image check hot.qcow2 | say check
ctl info | say without
ctl disk-add --disk "$HOT" | say added
wait_for restart
ctl disk-remove data.qcow2 | say removed
./ringdisk image check data.qcow2 | say check
wait $machine && echo "ended 0" || echo "ended $?"
free after
told hot
"#;
    let scripts = [("hot", HOT), ("few", "")];
    let (outcome, tools) = nested_with(&lab, &scratch, toolbox, &scripts, script)?;
    let all = outcome.lines().collect::<Vec<_>>().join("\n");
    let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
    let has = |wanted: &str| assert!(all.contains(wanted), "no {wanted:?}: {all}");
    has("inner @@exit 0");
    assert_eq!(value("ended "), "0", "{all}");
    has("missing ringdisk: ");
    has("few ringdisk: cannot get 536870912 bytes of memory for the guest in huge pages of 2097152 bytes");
    for wanted in [
        "pages before 256",
        "pages while 0",
        "pages after 256",
        "inner cpus 4",
        "twice ringdisk: disk data.qcow2 has the image data.qcow2; it can be shared only if both are readonly=on",
        "id ringdisk: a disk is called `data.qcow2` already",
        "queues ringdisk: disk hot.qcow2 has num_queues=5 for 4 CPUs",
        "corrupt ringdisk: zeros does not start like a QCOW2 image",
        "nodisk ringdisk: there is no disk `hot`; there are: root.qcow2, data.qcow2",
        "again ringdisk: a disk is called `hot` already",
        "paused ringdisk: the guest is paused: disk hot is removed when it goes on",
        "unlocked yes",
        "inner let go",
        "inner the load has failed",
    ] {
        has(wanted);
    }
    assert!(!value("untouched ").contains("hot"), "{all}");
    let places = ["inner found ", "inner back "].map(|key| value(key).split(' ').nth(2));
    assert_eq!(places, [Some("0000:00:03.0"); 2], "{all}");
    assert!(value("asked ").contains(r#""removing":true"#), "{all}");
    assert!(!value("without ").contains("hot"), "{all}");
    has("inner grown 262144 393216");
    let checks: Vec<_> = outcome
        .lines()
        .filter(|line| line.starts_with("check "))
        .collect();
    assert!(
        checks.len() >= 3 && checks.iter().all(|line| !line.contains("ERROR")),
        "{checks:?}"
    );
    let sums = inner(&outcome)
        .iter()
        .filter(|line| line.ends_with(": OK"))
        .count();
    assert_eq!(sums, 4, "before and after the restart: {all}");
    has("inner after the restart");
    has("data 0");
    for name in ["hot.qcow2", "data.qcow2"] {
        image::check_flawless(&take(&scratch, &tools, name)?)?;
    }
    Ok(())
}
