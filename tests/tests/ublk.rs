//! `ringdisk ublk` under real kernels, 6.12 and 7.x: block devices of QCOW2 and raw images, worked on hard, killed,
//! recovered and deleted. QEMU's tools judge the images after each of it, inside the guest.
//!
//! A kernel that waits for a server in vain hangs: then the guest does not end, and the test says so.

use std::panic;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use lab::nested::Toolbox;
use lab::{Error, Guest, Kernel, Lab, Outcome, Scratch, Server, image};

#[path = "ublk/claims.rs"]
mod claims;
#[path = "ublk/crash.rs"]
mod crash;
#[path = "ublk/half_recovered.rs"]
mod half_recovered;
#[path = "ublk/hand_over.rs"]
mod hand_over;
#[path = "ublk/lvm.rs"]
mod lvm;
#[path = "ublk/operations.rs"]
mod operations;
#[path = "ublk/scale.rs"]
mod scale;
#[path = "ublk/soak.rs"]
mod soak;
#[path = "ublk/upgrade.rs"]
mod upgrade;
#[path = "ublk/users.rs"]
mod users;
#[path = "ublk/zero_copy.rs"]
mod zero_copy;

const MIB: u64 = 1 << 20;

/// What every script begins with. The images are in memory; `ringdisk` is on the disk `tools`.
const PRELUDE: &str = r#"
modprobe ublk_drv
mount -o ro /dev/lab/tools /mnt
mkdir -p /tmp/work /run/mnt
cd /tmp/work
ringdisk() { /mnt/ringdisk "$@"; }
# Those that this kernel has.
transports="copy user-copy"
! ringdisk ublk features | grep -q AUTO_BUF_REG || transports="$transports zero-copy"
# add LOG ARGUMENTS…: serves in the background, waits for the devices, and leaves the server's number in $server.
add() {
    log=$1
    shift
    rm -f "$log.out"
    /mnt/ringdisk --log info ublk "$@" >"$log.out" 2>"$log.err" & server=$!
    tries=0
    until [ -s "$log.out" ]; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] && [ -d /proc/$server ] || { echo "no device:"; cat "$log.err"; exit 1; }
        sleep 0.1
    done
}
# ended NAME COMMAND…: says how a command ended, with what it complained of.
ended() {
    name=$1
    shift
    status=0
    "$@" >"/tmp/said" 2>&1 || status=$?
    echo "$name $status $(tr '\n' ' ' </tmp/said)"
}
check() { qemu-img check -q "$1" && echo "flawless $1"; }
# Only leaks may be left by a kill.
sound() {
    status=0
    qemu-img check -q "$1" >/tmp/check 2>&1 || status=$?
    [ $status = 0 ] || [ $status = 3 ] || { cat /tmp/check; exit 1; }
    echo "sound $1"
}
# kept DEVICE FILE: what the device reads as, to be held against its image when that is free. A checksum of it would take
# an emulated processor several times as long.
kept() { dd if="$1" of="$2" bs=1M iflag=direct conv=sparse status=none; }
# same FILE IMAGE NAME: says so if QEMU reads the same from the image, and not a byte more.
same() {
    case $2 in
    *raw) cmp "$1" "$2" ;;
    *) qemu-img compare -f raw -F qcow2 "$1" "$2" >/tmp/compared 2>&1 || true
        echo "Images are identical." | cmp - /tmp/compared || { cat /tmp/compared; false; } ;;
    esac && echo "same $3"
    rm "$1"
}
# xxhash, as the emulated processor's instruction for crc32c goes bit by bit.
verify() {
    target=$1
    shift
    fio --name=verified --filename="$target" --ioengine=libaio --iodepth=16 --direct=1 --bsrange=4k-256k --rw=randwrite \
        --size=16m --verify=xxhash --verify_fatal=1 --do_verify=1 --randseed=7 --eta=never --output=/tmp/fio "$@" ||
        { cat /tmp/fio; exit 1; }
}
"#;

/// The memory of a guest, in MiB.
const MEMORY_MIB: u32 = 1536;

/// How long a guest may take. The longest takes two minutes and a half when alone, and six beside others.
const PATIENCE: Duration = Duration::from_secs(900);

/// Leave for a guest with so many CPUs to be there: of all tests together, guests have three for each of this machine's,
/// and half of its memory. More would only be in each other's way, and in that of those whose time is measured.
struct Place {
    cpus: u64,
}

/// Who is there, and who waits: the first to come is the first to go in.
#[derive(Debug)]
struct Places {
    cpus: u64,
    came: u64,
    went_in: u64,
}

static PLACES: Mutex<Places> = Mutex::new(Places {
    cpus: 0,
    came: 0,
    went_in: 0,
});
static CHANGED: Condvar = Condvar::new();

impl Place {
    /// Waits for leave.
    fn take(cpus: u16) -> Self {
        let cpus = u64::from(cpus);
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib: Option<u64> = total.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
        let guests = kib.unwrap_or(0) / 1024 / 2 / u64::from(MEMORY_MIB);
        let processors = thread::available_parallelism().map_or(1, |count| count.get() as u64);
        let most = (3 * processors).min(2 * guests).max(cpus);

        let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = places.came;
        places.came += 1;
        let waits = |places: &mut Places| places.went_in != turn || places.cpus + cpus > most;
        let mut places = CHANGED
            .wait_while(places, waits)
            .unwrap_or_else(PoisonError::into_inner);
        places.went_in += 1;
        places.cpus += cpus;
        CHANGED.notify_all();
        Self { cpus }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        PLACES.lock().unwrap_or_else(PoisonError::into_inner).cpus -= self.cpus;
        CHANGED.notify_all();
    }
}

/// Runs `script` in a guest of this kernel.
fn run(lab: &Lab, scratch: &Scratch, script: &str) -> Result<Outcome, Error> {
    run_with(lab, scratch, script, Ok)
}

/// As [`run`], with more tools.
fn run_with(
    lab: &Lab,
    scratch: &Scratch,
    script: &str,
    more: impl FnOnce(Toolbox) -> Result<Toolbox, Error>,
) -> Result<Outcome, Error> {
    run_in(lab, scratch, 2, script, more, |guest| guest)
}

/// As [`run_with`], in a guest with so many CPUs that is not as the others. Once more if QEMU fails in itself.
fn run_in<'lab>(
    lab: &'lab Lab,
    scratch: &Scratch,
    cpus: u16,
    script: &str,
    more: impl FnOnce(Toolbox) -> Result<Toolbox, Error>,
    other: impl Fn(Guest<'lab>) -> Guest<'lab>,
) -> Result<Outcome, Error> {
    let _place = Place::take(cpus);
    let toolbox = more(Toolbox::new(lab, scratch)?)?;
    let once = || -> Result<Outcome, Error> {
        let tools = toolbox.make(160 * MIB)?;
        let root = scratch.file("root.qcow2");
        image::overlay(&root, lab.base())?;
        let disks = [
            ("root", format!("path={},backing_files=on", root.display())),
            (
                "tools",
                format!("path={},image_type=raw,readonly=on", tools.display()),
            ),
        ];
        let mut guest = Guest::new(lab)
            .cpus(cpus)
            .memory_mib(MEMORY_MIB)
            .patience(PATIENCE)
            .script(&format!("{PRELUDE}{script}"));
        let mut servers = Vec::new();
        for (name, disk) in disks {
            let socket = scratch.file(&format!("{name}.sock"));
            servers.push(Server::ringdisk(&socket, &disk)?);
            guest = guest.disk(name, &socket, 1);
        }
        let outcome = other(guest).run(scratch, "guest")?;
        for server in servers {
            server.stop()?;
        }
        Ok(outcome)
    };
    match once() {
        Err(failure) if failure.is_emulators() => {
            lab::begun_again("QEMU failed in iotlb_to_section", &failure.to_string());
            once()
        }
        outcome => outcome,
    }
}

/// Does `each` with every kernel, with all of them at the same time: guests wait more than they work.
fn on_each(each: impl Fn(Kernel, &Lab) -> Result<(), Error> + Sync) -> Result<(), Error> {
    let each = &each;
    thread::scope(|scope| {
        let labs = [Kernel::V6_12, Kernel::V7].map(|kernel| (kernel, lab::require_kernel(kernel)));
        let running: Vec<_> = labs
            .into_iter()
            .filter_map(|(kernel, lab)| {
                // The harness names a test's thread after it, and a test is known by that.
                let named = thread::Builder::new().name(lab::test_name());
                let spawn = |lab| named.spawn_scoped(scope, move || each(kernel, &lab));
                Some(spawn(lab?).expect("a thread"))
            })
            .collect();
        // The first to fail is told, when all have ended.
        let ended: Vec<_> = running.into_iter().map(thread::ScopedJoinHandle::join).collect();
        ended
            .into_iter()
            .try_for_each(|ended| ended.unwrap_or_else(|failure| panic::resume_unwind(failure)))
    })
}

/// Runs `script` on each kernel and hands what it said to `judge`.
fn on_both(script: &str, judge: impl Fn(Kernel, &Outcome) + Sync) -> Result<(), Error> {
    on_each(|kernel, lab| {
        let scratch = Scratch::new()?;
        judge(kernel, &run(lab, &scratch, script)?);
        Ok(())
    })
}

/// The transports that a kernel has.
fn transports(kernel: Kernel) -> &'static [&'static str] {
    match kernel {
        Kernel::V6_12 => &["copy", "user-copy"],
        Kernel::V7 => &["copy", "user-copy", "zero-copy"],
    }
}

fn said(outcome: &Outcome) -> String {
    outcome.lines().collect::<Vec<_>>().join("\n")
}

const WORK: &str = r#"
ringdisk ublk features | tr '\n' ' ' | sed 's/^/features /'
echo
# Not in memory, as the images of the other tests are.
mkdir -p /var/work
cd /var/work
ringdisk image create q.qcow2 64M >/dev/null
truncate -s 64M r.raw
for transport in $transports; do
    for disk in path=q.qcow2 path=r.raw,image_type=raw; do
        add work add --disk $disk,num_queues=2 --transport $transport --json
        sed 's/^/made /' work.out
        dev=/dev/ublkb0
        verify $dev --numjobs=2 --cpus_allowed=0,1 --cpus_allowed_policy=split --offset_increment=24m
        ringdisk ublk info 0 --json | sed "s/^/info $transport /"
        # Zeroes that may be holes and zeroes that may not, discards, and writes that are durable by themselves.
        head -c 3M /dev/urandom >data
        dd if=data of=$dev bs=1M oflag=direct,dsync status=none
        blkdiscard -o 512k -l 256k $dev
        blkdiscard -z -o 1M -l 1000k $dev
        fallocate -p -o 2200k -l 16k $dev
        dd if=/dev/zero of=data bs=1k seek=1024 count=1000 conv=notrunc status=none
        dd if=/dev/zero of=data bs=1k seek=2200 count=16 conv=notrunc status=none
        for part in "0 2" "3 1" "4 8"; do
            set -- $part
            dd if=$dev bs=256k skip=$1 count=$2 status=none >one
            dd if=data bs=256k skip=$1 count=$2 status=none >other
            cmp one other
        done
        kept $dev kept.raw
        kill $server
        wait $server && echo "stopped $transport $disk" || { cat work.err; exit 1; }
        test ! -e $dev
        case $disk in
        *raw) image=r.raw ;;
        *) image=q.qcow2; check q.qcow2 ;;
        esac
        same kept.raw $image "$transport $disk"
    done
done
"#;

#[test]
fn devices_of_every_transport_hold_what_was_written() -> Result<(), Error> {
    on_both(WORK, |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.contains(wanted)).count();
        for &transport in transports(kernel) {
            let in_force = format!(r#""transport":"{transport}""#);
            let made = outcome.lines().filter(|line| line.starts_with("made "));
            let made = made.filter(|line| line.contains(&in_force)).count();
            assert_eq!(made, 2, "{transport} was in force: {all}");
            assert_eq!(count(&format!("stopped {transport} ")), 2, "{all}");
            assert_eq!(count(&format!("same {transport} ")), 2, "{all}");
            zero_copy::assert_in_force(transport, outcome);
        }
        assert_eq!(count("flawless q.qcow2"), transports(kernel).len(), "{all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}

/// File systems on devices of one server; who may have what, and who may remove it.
const LIFE: &str = r#"
modprobe xfs
for name in a b c; do ringdisk image create $name.qcow2 400M >/dev/null; done
add life add --disk path=a.qcow2,num_queues=2 path=b.qcow2 --id 4 --queues-per-worker 2
tr '\n' ' ' <life.out | sed 's/^/devices /'
echo
ended locked ringdisk ublk add --disk path=a.qcow2
ended taken ringdisk ublk add --disk path=c.qcow2 --id 4
ended missing ringdisk ublk add --disk path=c.qcow2 path=none.qcow2
ringdisk ublk features | grep -q AUTO_BUF_REG || ended zero-copy ringdisk ublk add --disk path=c.qcow2 --transport zero-copy
ended nothing ringdisk ublk del 77
ringdisk ublk list --json | sed 's/^/list /'
ringdisk ublk info 4 --json | sed 's/^/info /'

mkfs.ext4 -q /dev/ublkb4
mkfs.xfs -q -f /dev/ublkb5
mkdir -p /run/ext4 /run/xfs
mount /dev/ublkb4 /run/ext4
mount /dev/ublkb5 /run/xfs
for place in /run/ext4 /run/xfs; do
    fio --name=verified --directory=$place --size=16m --numjobs=2 --rw=randwrite --bsrange=4k-64k --ioengine=libaio \
        --iodepth=16 --direct=1 --fsync=64 --fallocate=none --verify=xxhash --verify_fatal=1 --do_verify=1 --eta=never \
        --output=/tmp/fio || { cat /tmp/fio; exit 1; }
    yes junk | head -c 48M >$place/junk
    sync
    rm $place/junk
    sync
    fstrim -v $place | sed 's/^/trimmed /'
done
(cd / && md5sum /run/ext4/verified* /run/xfs/verified* >/tmp/sums)
ended mounted ringdisk ublk del 4
umount /run/ext4 /run/xfs
sleep 1000 </dev/ublkb5 & holder=$!
ended opened ringdisk ublk del 5
kill $holder
wait $holder || true
ended deleted ringdisk ublk del 4
test ! -e /dev/ublkb4 && test ! -e /dev/ublkc4
check a.qcow2
kill $server
wait $server && echo "life 0"
check b.qcow2
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'

# In the background, and found again by others.
/mnt/ringdisk ublk add --disk path=a.qcow2 path=b.qcow2,readonly=on --recovery off --daemonize | tr '\n' ' ' | sed 's/^/background /'
echo
mount /dev/ublkb0 /run/ext4
ended read-only dd if=/dev/zero of=/dev/ublkb1 bs=4k count=1 oflag=direct
mount -o ro,norecovery /dev/ublkb1 /run/xfs
(cd / && md5sum -c --quiet /tmp/sums) && echo "sums fine"
umount /run/ext4 /run/xfs
ended all ringdisk ublk del --all
ringdisk ublk list | wc -l | sed 's/^/left /'
check a.qcow2
check b.qcow2

# A partition table in a guest's disk is the guest's.
ringdisk image create p.qcow2 64M >/dev/null
add parted add --disk path=p.qcow2
printf '\000\000\000\000\203\000\000\000\000\010\000\000\000\200\000\000' | dd of=/dev/ublkb0 bs=1 seek=446 status=none
printf '\125\252' | dd of=/dev/ublkb0 bs=1 seek=510 conv=fsync status=none
kill $server
wait $server
add parted add --disk path=p.qcow2
echo "partitions $(ls -m /dev/ublkb*)"
kill $server
wait $server
add parted add --disk path=p.qcow2 --partitions
# Newer kernels look for them after they have answered.
tries=0
until [ -e /dev/ublkb0p1 ] || [ $tries -ge 300 ]; do tries=$((tries + 1)); sleep 0.1; done
echo "wanted $(ls -m /dev/ublkb*)"

# Larger while it is served, where the kernel can.
ended grown ringdisk ublk set-size 0 128M
blockdev --getsize64 /dev/ublkb0 | sed 's/^/size /'
ended smaller ringdisk ublk set-size 0 1M
kill $server
wait $server
check p.qcow2
qemu-img info p.qcow2 | sed -n 's/^virtual size/virtual/p'
"#;

#[test]
fn file_systems_live_on_devices_and_nobody_removes_them_from_under_their_users() -> Result<(), Error> {
    on_both(LIFE, |kernel, outcome| {
        let all = said(outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let has = |key: &str, text: &str| assert!(value(key).contains(text), "{key}: {text}: {all}");
        has("devices ", "/dev/ublkb4 /dev/ublkb5");
        for (key, text) in [
            ("locked ", "a.qcow2"),
            ("locked ", "1 ringdisk: "),
            (
                "taken ",
                "1 ringdisk: c.qcow2: ADD_DEV of /dev/ublkb4 failed (the number is taken",
            ),
            ("missing ", "1 ringdisk: cannot open none.qcow2"),
            ("nothing ", "there is no such device"),
            ("mounted ", "1 ringdisk: /dev/ublkb4 is in use (it is mounted"),
            ("opened ", "1 ringdisk: /dev/ublkb5 is in use (process"),
            ("deleted ", "0 "),
            ("life ", "0"),
            ("remembered ", "0"),
            ("background ", "/dev/ublkb0 /dev/ublkb1"),
            ("sums ", "fine"),
            ("read-only ", "1 "),
            ("all ", "0 "),
            ("left ", "0"),
            ("smaller ", "1 "),
        ] {
            has(key, text);
        }
        let list: String = value("list ").to_owned();
        assert_eq!(
            list.matches(r#""state":"live""#).count(),
            2,
            "no half-made device: {list}"
        );
        has("info ", r#""workers":1"#);
        if kernel == Kernel::V7 {
            has("info ", r#""transport":"zero-copy""#);
        } else {
            has("info ", r#""transport":"user-copy""#);
            has(
                "zero-copy ",
                "1 ringdisk: c.qcow2: this kernel's ublk driver has no zero copy (Linux 6.16)",
            );
        }
        assert_eq!(
            outcome
                .lines()
                .filter(|line| line.starts_with("trimmed "))
                .count(),
            2,
            "{all}"
        );
        assert_eq!(
            outcome
                .lines()
                .filter(|line| line.starts_with("flawless "))
                .count(),
            5,
            "{all}"
        );
        assert_eq!(value("partitions "), "/dev/ublkb0", "{all}");
        assert_eq!(value("wanted "), "/dev/ublkb0, /dev/ublkb0p1", "{all}");
        if kernel == Kernel::V7 {
            has("grown ", "0 134217728");
            assert_eq!(value("size "), "134217728", "{all}");
            has("virtual", "128 MiB");
        } else {
            has("grown ", "1 ringdisk: this kernel's ublk driver cannot");
            assert_eq!(value("size "), "67108864", "{all}");
            has("virtual", "64 MiB");
        }
        let complaints = outcome.complaints();
        assert_eq!(complaints, Vec::<&str>::new(), "{}", outcome.console());
    })
}

/// Devices of many kinds, each removed under load.
const CHURN: &str = r#"
ringdisk image create -o cluster_size=16k q.qcow2 256M >/dev/null
truncate -s 256M r.raw
for round in 1 2 3 4 5 6; do
    case $round in
    1 | 4) how="--transport copy --queues-per-worker 2" sizes=4k-64k ;;
    2 | 5) how="--transport user-copy --recovery off" sizes=4k-64k ;;
    *) how="--max-io 64K" sizes=4k-256k ;;
    esac
    add churn add --disk path=q.qcow2,num_queues=2 path=r.raw,image_type=raw,queue_size=32 $how
    for dev in /dev/ublkb0 /dev/ublkb1; do
        # Deeper than a queue, so that every tag is busy when the device goes.
        fio --name=load --filename=$dev --size=200m --rw=randrw --bsrange=$sizes --ioengine=libaio --iodepth=256 --direct=1 \
            --time_based --runtime=100 --allow_file_create=0 --eta=never --output=/tmp/fio.$(basename $dev) 2>/dev/null &
    done
    (while :; do blkdiscard -o 64M -l 32M /dev/ublkb0 2>/dev/null || exit 0; done) &
    for dev in ublkb0 ublkb1; do
        tries=0
        until [ "$(awk '{ print ($1 > 100 && $5 > 100) }' /sys/block/$dev/stat)" = 1 ]; do
            tries=$((tries + 1))
            [ $tries -lt 300 ] || { echo "no load"; cat /tmp/fio.*; exit 1; }
            sleep 0.1
        done
    done
    ended refused ringdisk ublk del 0 1
    began=$(date +%s%N)
    case $round in
    1 | 2 | 3) ended forced ringdisk ublk del --all --force ;;
    *) kill $server ;;
    esac
    wait $server && echo "server 0"
    echo "gone after $((($(date +%s%N) - began) / 1000000)) ms"
    wait
    test ! -e /dev/ublkb0 && test ! -e /dev/ublkc1
    check q.qcow2
done
ringdisk ublk list | wc -l | sed 's/^/left /'
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'
"#;

/// Devices that are removed with every tag of every queue under way, by others and by their own server's end.
#[test]
fn devices_come_and_go_under_load_and_leave_nothing_behind() -> Result<(), Error> {
    on_both(CHURN, |_, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        assert_eq!(count("refused 1 ringdisk: /dev/ublkb0 is in use"), 6, "{all}");
        assert_eq!(count("forced 0"), 3, "{all}");
        assert_eq!((count("server 0"), count("flawless q.qcow2")), (6, 6), "{all}");
        assert_eq!((count("left 0"), count("remembered 0")), (1, 1), "{all}");
        let slow = |line: &&str| {
            line.split(' ')
                .nth(2)
                .and_then(|ms| ms.parse().ok())
                .unwrap_or(u64::MAX)
                > 30_000
        };
        let gone: Vec<&str> = outcome.lines().filter(|line| line.starts_with("gone ")).collect();
        assert!(!gone.iter().any(slow), "{gone:?}");
        // Whoever used them was told so; nothing else went wrong.
        let told = |line: &&&str| !(line.contains("I/O error") && line.contains("dev ublkb"));
        let complaints = outcome.complaints();
        let others: Vec<_> = complaints.iter().filter(told).collect();
        assert!(others.is_empty(), "{others:?}");
    })
}

/// Servers that are killed under load, and others that go on with their devices.
const DEATH: &str = r#"
for transport in $transports; do
    rm -f q.qcow2
    ringdisk image create -o cluster_size=16k q.qcow2 160M >/dev/null
    add first add --disk path=q.qcow2,num_queues=2 --transport $transport
    mkfs.ext4 -q -b 4096 /dev/ublkb0
    mount /dev/ublkb0 /run/mnt
    fio --name=load --directory=/run/mnt --size=48m --numjobs=2 --rw=randwrite --bsrange=4k-64k --ioengine=libaio --iodepth=16 \
        --direct=1 --fsync=32 --fallocate=none --verify=xxhash --verify_fatal=1 --do_verify=1 --time_based --runtime=9 \
        --eta=never --output=/tmp/fio & load=$!
    for round in 1 2 3; do
        sleep 1.$round
        kill -9 $server
        wait $server || true
        case $round in
        1) ended unknown ringdisk ublk recover 9 ;;
        2) ended wrong ringdisk ublk recover 0 --disk path=r.raw,image_type=raw ;;
        esac
        began=$(date +%s%N)
        add again recover 0
        echo "recovered $transport $round after $((($(date +%s%N) - began) / 1000000)) ms: $(cat again.out)"
        ended living ringdisk ublk recover 0
    done
    wait $load || { cat /tmp/fio; exit 1; }
    echo "load $transport 0"
    dd if=/dev/urandom of=/run/mnt/kept bs=1M count=8 status=none
    (cd / && md5sum /run/mnt/kept /run/mnt/load* >/tmp/sums)
    # Killed with what the host believes written in its own memory only.
    kill -9 $server
    wait $server || true
    add again recover --all
    (cd / && md5sum -c --quiet /tmp/sums) && echo "sums $transport fine"
    umount /run/mnt
    e2fsck -fn /dev/ublkb0 >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 1; }
    kept /dev/ublkb0 kept.raw
    ringdisk ublk info 0 --json | sed "s/^/info $transport /"
    ended deleted ringdisk ublk del 0
    wait $server && echo "server $transport 0"
    sound q.qcow2
    same kept.raw q.qcow2 $transport
done

# A device that is not to outlive its server goes with it; one that is and was forgotten can be deleted.
add off add --disk path=q.qcow2 --recovery off
kill -9 $server
wait $server || true
tries=0
while [ -e /dev/ublkb0 ] && [ $tries -lt 300 ]; do tries=$((tries + 1)); sleep 0.1; done
ringdisk ublk list | sed 's/^/off /'
ended swept ringdisk ublk del --all
add on add --disk path=q.qcow2
kill -9 $server
wait $server || true
sleep 1
ended orphan ringdisk ublk del 0
ringdisk ublk list | wc -l | sed 's/^/left /'
sound q.qcow2
"#;

#[test]
fn io_waits_for_the_next_server_when_one_is_killed_and_nothing_is_lost() -> Result<(), Error> {
    on_both(DEATH, |kernel, outcome| {
        let all = said(outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        for &transport in transports(kernel) {
            assert_eq!(count(&format!("recovered {transport} ")), 3, "{all}");
            for line in ["load {} 0", "sums {} fine", "server {} 0", "same {}"] {
                assert_eq!(count(&line.replace("{}", transport)), 1, "{line}: {all}");
            }
            // The successor does as the first one did.
            zero_copy::assert_in_force(transport, outcome);
        }
        assert!(value("unknown ").contains("there is no such device"), "{all}");
        assert!(value("wrong ").starts_with("1 "), "{all}");
        assert_eq!(
            count("living 1 "),
            3 * transports(kernel).len(),
            "a device that is served is left alone: {all}"
        );
        assert!(value("orphan ").starts_with("0"), "{all}");
        assert_eq!(value("left "), "0", "{all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}
