//! Block devices of this machine: `ringdisk ublk` beside `rublk` and `qemu-nbd`, in one emulated guest for each kernel,
//! two CPUs, images in memory unless a row says otherwise, fio.
//!
//! `rublk` is a published crate; `make bench` installs it, or `RUBLK` names its binary. The guest is emulated, so
//! absolute figures mean nothing, and ratios only within one run.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::nested::{Nested, Toolbox};
use lab::{Kernel, Lab, Scratch};

use super::said::{self, Entries, Said, failed};
use super::{Bench, Row};
use crate::report::{Better, Entry};
use crate::server::Program;

const DISK_BYTES: u64 = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(1500);

/// Before the turns: images whose every cluster is written, one for each device but for raw ones.
const PREPARE: &str = r#"
modprobe ublk_drv
modprobe nbd max_part=0 || true
mount -o ro /dev/lab/tools /mnt
mkdir -p /tmp/work /run/lock /var/work
mount -t tmpfs -o size=1400m none /tmp/work
cd /tmp/work
/mnt/ringdisk image create q.qcow2 128M >/dev/null
for part in 0 64; do
    /mnt/ringdisk io --disk path=q.qcow2 -c "write -P 1 ${part}M 64M" >/dev/null
done
head -c 128M /dev/zero | tr '\0' '\1' >r.raw
# key WHO: as the name of a variable may be.
key() { echo $1 | tr - _; }
# attach WHO ID: makes a device of an image, served in the background.
attach() {
    image=$1.qcow2
    case $1 in
    disk-*) image=/var/work/$1.qcow2 ;;
    *raw | *loop*) image=r.raw ;;
    esac
    [ -e $image ] || cp q.qcow2 $image
    device=/dev/ublkb$2
    server=
    case $1 in
    ours-* | disk-*)
        disk=path=$image
        how=auto
        case $1 in
        *raw) disk=$disk,image_type=raw ;;
        disk-*) sync; disk=$disk,direct=on ;;
        *two-queues) disk=$disk,num_queues=2 ;;
        esac
        case $1 in
        *user-copy*) how=user-copy ;;
        *zero-copy) how=zero-copy ;;
        esac
        : >out
        /mnt/ringdisk ublk add --id $2 --disk $disk --transport $how >out 2>$1.err & server=$!
        until [ -s out ]; do sleep 0.05; [ -d /proc/$server ] || { cat $1.err; exit 1; }; done ;;
    rublk-*)
        case $1 in
        *qcow2) what="qcow2 -f $image" ;;
        *loop) what="loop -f $image" ;;
        *loop-z) what="loop -f $image -z" ;;
        esac
        /mnt/rublk add $what -n $2 -q 1 -d 128 >out 2>&1
        until [ -b $device ]; do sleep 0.05; done ;;
    nbd)
        device=/dev/nbd0
        /mnt/qemu-nbd -f qcow2 --cache=writeback --aio=io_uring -c $device $image
        until [ "$(cat /sys/block/nbd0/size)" -gt 0 ]; do sleep 0.05; done ;;
    esac
    echo none >/sys/block/$(basename $device)/queue/scheduler 2>/dev/null || true
    eval "device_$(key $1)=$device server_$(key $1)=$server"
    # Everyone has met the whole image, by each queue.
    for cpu in 0 1; do
        fio --name=warm --filename=$device --size=128m --rw=read --bs=128k --iodepth=16 --direct=1 --ioengine=io_uring \
            --cpus_allowed=$cpu --minimal >/dev/null
    done
}
# detach WHO: of those with a server of ours, or all others.
detach() {
    eval "device=\$device_$(key $1) server=\$server_$(key $1)"
    case $1 in
    ours-* | disk-*) kill $server; wait $server ;;
    rublk-*) /mnt/rublk del -n ${device#/dev/ublkb} >/dev/null 2>&1; while [ -e $device ]; do sleep 0.05; done ;;
    nbd) /mnt/qemu-nbd -d $device >/dev/null; while [ "$(cat /sys/block/nbd0/size)" -gt 0 ]; do sleep 0.05; done ;;
    esac
}
# work WHO FIGURE PATTERN BLOCK DEPTH JOBS [MORE]: one second of it.
work() {
    eval "device=\$device_$(key $1)"
    fio --name=job --filename=$device --size=128m --rw=$3 --bs=$4 --iodepth=$5 --numjobs=$6 --group_reporting --direct=1 \
        --ioengine=io_uring --norandommap --randrepeat=0 --time_based --runtime=1 --minimal ${7:-} ${8:-} >fio
    awk -F';' -v what="@ $1 $2" '{ print what, $8 + $49 }' fio
}
# cpus: how long the CPUs were idle so far, and all of their time.
cpus() { awk '/^cpu / { print $5 + $6, $2 + $3 + $4 + $5 + $6 + $7 + $8 }' /proc/stat; }
# two WHO FIGURE BLOCK DEPTH: a job for each CPU, and so for each queue, and what of the CPUs is left idle, in percent, while both
# are at work: when fio begins and ends, only one of them is.
two() {
    eval "counts=/sys/block/\$(basename \$device_$(key $1))/stat"
    begun=$(awk '{ print $1 + 200 }' $counts)
    work $1 $2 randread $3 $4 2 --cpus_allowed=0,1 --cpus_allowed_policy=split & job=$!
    until [ "$(awk '{ print $1 }' $counts)" -gt $begun ]; do sleep 0.02; done
    sleep 0.2
    before=$(cpus)
    sleep 0.5
    after=$(cpus)
    wait $job
    echo $before $after | awk -v what="@ $1 $2-idle" '{ print what, 100 * ($3 - $1) / ($4 - $2) }'
}
# figure WHO FIGURE: a second of it, if it is for them.
figure() {
    case $2:$1 in
    two-queues-4k:ours-auto | two-queues-4k:ours-two-queues) two $1 $2 4k 32 ;;
    two-queues-128k:ours-user-copy*) two $1 $2 128k 16 ;;
    two-queues-*) ;;
    *:*two-queues | *:ours-user-copy | *-4k:disk-* | *-128k:nbd) ;;
    read-4k:*) work $1 $2 randread 4k 32 1 ;;
    write-4k:*) work $1 $2 randwrite 4k 32 1 ;;
    read-128k:*) work $1 $2 read 128k 16 1 ;;
    write-128k:*) work $1 $2 write 128k 16 1 ;;
    esac
}
# All of them are there all the time, and take turns of a second: the machine's speed changes from minute to minute.
turns() {
    id=0
    for who in $whom; do
        attach $who $id
        id=$((id + 1))
    done
    for figure in read-4k write-4k read-128k write-128k two-queues-4k two-queues-128k; do
        for round in $(seq $rounds); do
            for who in $whom; do figure $who $figure; done
            whom=$(for who in $whom; do echo $who; done | tac | tr '\n' ' ')
        done
    done
    for who in $whom; do detach $who; done
    /mnt/ringdisk image check ours-auto.qcow2
}
# Killed, and served again: from the kill to the first answer. Then many devices at a time.
recover() {
    attach ours-auto 0
    fio --name=load --filename=$device --size=128m --rw=randrw --bs=4k --iodepth=32 --direct=1 --ioengine=io_uring --time_based \
        --runtime=30 --minimal >/dev/null 2>&1 & load=$!
    sleep 1
    begin=$(date +%s%N)
    kill -9 $server
    wait $server || true
    : >out
    /mnt/ringdisk ublk recover 0 >out 2>err & server=$!
    dd if=$device of=/dev/null bs=4k count=1 iflag=direct status=none
    echo "@ ours-auto recovery-ms $((($(date +%s%N) - begin) / 1000000))"
    kill $load
    wait $load || true
    kill $server
    wait $server
}
# many COUNT: so many busy devices of one server, which is killed and followed by another.
many() {
    disks=
    for n in $(seq $1); do
        rm -f m$n.qcow2
        /mnt/ringdisk image create m$n.qcow2 16M >/dev/null
        disks="$disks path=m$n.qcow2,num_queues=4,queue_size=128"
    done
    : >out
    /mnt/ringdisk ublk add --disk $disks --queues-per-worker 4 >out 2>err & server=$!
    until [ "$(wc -l <out)" = $1 ]; do sleep 0.1; [ -d /proc/$server ] || { cat err; exit 1; }; done
    # One fio with a thread for each: so many processes take seconds to start, and meanwhile the CPUs.
    jobs=
    for device in $(cat out); do jobs="$jobs --name=$(basename $device) --filename=$device"; done
    fio --thread --size=16m --rw=randwrite --bs=4k --iodepth=32 --direct=1 --ioengine=io_uring --time_based --runtime=300 --minimal \
        $jobs >/dev/null 2>&1 & load=$!
    for device in $(cat out); do
        until [ "$(awk '{ print $5 }' /sys/block/$(basename $device)/stat)" -gt 64 ]; do sleep 0.1; done
    done
    sleep 1
    begin=$(date +%s%N)
    kill -9 $server
    wait $server 2>/dev/null || true
    until [ "$(/mnt/ringdisk ublk list --json | tr '{' '\n' | grep -c -i quiesced)" = $1 ]; do sleep 0.05; done
    echo "@ ours-auto teardown-$1-ms $((($(date +%s%N) - begin) / 1000000))"
    begin=$(date +%s%N)
    : >out
    /mnt/ringdisk --log info ublk recover --all --queues-per-worker 4 >out 2>err & server=$!
    until [ "$(wc -l <out)" = $1 ]; do sleep 0.05; [ -d /proc/$server ] || { cat err; exit 1; }; done
    echo "@ ours-auto told-$1-ms $((($(date +%s%N) - begin) / 1000000))"
    # When the last one was live, by the server's log: 2026-01-31T12:34:56.789012Z.
    grep ' recovered ' err | tail -n 1 | awk -F'[T:Z]' -v begin=$begin -v what="@ ours-auto recovery-$1-ms" \
        '{ print what, (($2 * 3600 + $3 * 60 + $4) * 1000 - begin / 1000000 % 86400000 + 86400000) % 86400000 }'
    kill -9 $load
    wait $load 2>/dev/null || true
    kill $server
    wait $server
}
"#;

/// One kernel: what takes part there.
#[derive(Clone, Copy, Debug)]
struct Place {
    row: &'static str,
    kernel: Kernel,
    /// Whether the driver has zero copy.
    zero_copy: bool,
}

const PLACES: [Place; 2] = [
    Place {
        row: "ublk-6.12",
        kernel: Kernel::V6_12,
        zero_copy: false,
    },
    Place {
        row: "ublk-7",
        kernel: Kernel::V7,
        zero_copy: true,
    },
];

/// A figure: its name, ours, whose it is beside, the workload, and what the ratio must reach.
type Compared = (&'static str, &'static str, &'static str, &'static str, f64);

/// Two queues against one: the workload, who with two, who with one. At 128 KiB and by user copy most of the work is the server's;
/// at 4 KiB one queue and its client can leave less idle than the target takes, and then there is none.
const TWO_QUEUES: [(&str, &str, &str); 2] = [
    ("two-queues-4k", "ours-two-queues", "ours-auto"),
    ("two-queues-128k", "ours-user-copy-two-queues", "ours-user-copy"),
];

/// What two queues reach where CPUs allow.
const TWO_QUEUES_MIN: f64 = 1.6;

/// What is compared where the driver has only copies.
const ALWAYS: [Compared; 8] = [
    ("read-4k/rublk-qcow2", "ours-auto", "rublk-qcow2", "read-4k", 1.7),
    (
        "write-4k/rublk-qcow2",
        "ours-auto",
        "rublk-qcow2",
        "write-4k",
        1.7,
    ),
    ("read-4k/nbd", "ours-auto", "nbd", "read-4k", 6.0),
    ("write-4k/nbd", "ours-auto", "nbd", "write-4k", 6.0),
    ("read-4k/raw", "ours-auto", "ours-raw", "read-4k", 0.92),
    ("write-4k/raw", "ours-auto", "ours-raw", "write-4k", 0.92),
    ("read-128k/raw", "ours-auto", "ours-raw", "read-128k", 0.92),
    ("write-128k/raw", "ours-auto", "ours-raw", "write-128k", 0.92),
];

/// What is compared where the driver has zero copy too. It is beside our own user copy on a disk: an image in memory is copied once
/// by either.
const ZERO_COPY: [Compared; 8] = [
    (
        "read-128k/rublk-qcow2",
        "ours-auto",
        "rublk-qcow2",
        "read-128k",
        1.9,
    ),
    (
        "write-128k/rublk-qcow2",
        "ours-auto",
        "rublk-qcow2",
        "write-128k",
        1.9,
    ),
    (
        "read-4k/rublk-loop-z",
        "ours-auto",
        "rublk-loop-z",
        "read-4k",
        1.0,
    ),
    (
        "write-4k/rublk-loop-z",
        "ours-auto",
        "rublk-loop-z",
        "write-4k",
        1.0,
    ),
    (
        "read-128k/disk-user-copy",
        "disk-zero-copy",
        "disk-user-copy",
        "read-128k",
        1.5,
    ),
    (
        "write-128k/disk-user-copy",
        "disk-zero-copy",
        "disk-user-copy",
        "write-128k",
        1.5,
    ),
    (
        "read-128k/rublk-loop-z",
        "ours-auto",
        "rublk-loop-z",
        "read-128k",
        1.0,
    ),
    (
        "write-128k/rublk-loop-z",
        "ours-auto",
        "rublk-loop-z",
        "write-128k",
        1.0,
    ),
];

/// The most that a thing may take: figure, what, seconds.
const BOUNDS: [(&str, &str, f64); 3] = [
    ("recovery", "recovery-ms", 1.0),
    ("teardown-32x4", "teardown-32-ms", 5.0),
    ("recovery-32x4", "recovery-32-ms", 5.0),
];

/// What is to be linear in devices: the time of one of 8 and of one of 32.
const LINEAR: [(&str, &str, &str); 2] = [
    ("teardown-32x4/linear", "teardown-8-ms", "teardown-32-ms"),
    ("recovery-32x4/linear", "recovery-8-ms", "recovery-32-ms"),
];

/// What is linear is at 1, and what grows with the square of devices at a quarter.
const LINEAR_MIN: f64 = 0.5;

impl Place {
    fn compared(&self) -> impl Iterator<Item = &'static Compared> {
        let more: &[Compared] = if self.zero_copy { &ZERO_COPY } else { &[] };
        ALWAYS.iter().chain(more)
    }

    fn whom(&self) -> String {
        let mut whom = vec![
            "ours-auto",
            "rublk-qcow2",
            "ours-raw",
            "nbd",
            "ours-two-queues",
            "ours-user-copy",
            "ours-user-copy-two-queues",
        ];
        if self.zero_copy {
            whom.extend(["disk-user-copy", "disk-zero-copy", "rublk-loop-z"]);
        }
        whom.join(" ")
    }
}

/// The rows of this part.
#[must_use]
pub(crate) fn rows() -> Vec<Row> {
    let row = |place: Place| {
        let mut promises: Vec<_> = place
            .compared()
            .map(|(name, .., ratio)| (*name, *ratio))
            .collect();
        promises.extend(BOUNDS.iter().map(|(name, ..)| (*name, 1.0)));
        promises.extend(LINEAR.iter().map(|(name, ..)| (*name, LINEAR_MIN)));
        Row {
            name: place.row,
            promises,
            run: Box::new(move |row, bench| run(row, bench, place)),
        }
    };
    PLACES.map(row).into()
}

fn run(row: &Row, bench: &mut Bench, place: Place) -> io::Result<Vec<Entry>> {
    let Program::Ringdisk(ringdisk) = &bench.ours else {
        return Err(io::Error::other("this row has no other side than ringdisk's"));
    };
    let seconds = bench.timing.measure.as_secs_f64().max(1.0);
    let (said, failure) = inside(ringdisk, place, bench.pairs, seconds)?;
    let of = |who, what| said.median(who, what);
    let mut entries = Entries::default();
    for (name, ours, peer, what, _) in place.compared() {
        let entry = || {
            let beside = (*peer, of(peer, what)?);
            Ok(row.entry(name, "IOPS", Better::Higher, of(ours, what)?, beside))
        };
        entries.add(entry());
    }
    for (what, two, one) in TWO_QUEUES {
        // Two queues have no more than what one leaves, and nobody gets the last twentieth of a machine.
        let idle = format!("{what}-idle");
        let room = said
            .median(one, &idle)
            .map(|idle| 100.0 / (100.0 - idle.min(99.0)));
        let entry = |room: f64| {
            let beside = ("one queue", of(one, what)?);
            let allowed = room >= TWO_QUEUES_MIN / 0.95;
            let entry = row.entry(what, "IOPS", Better::Higher, of(two, what)?, beside);
            Ok(entry.target(allowed.then_some(TWO_QUEUES_MIN)))
        };
        if let Ok(room) = room {
            entries.add(entry(room));
        }
        let name = format!("{what}/room");
        entries.add(room.map(|room| row.entry(&name, "×", Better::Higher, room, ("one queue", 1.0))));
    }
    for (name, what, bound) in BOUNDS {
        let took = of("ours-auto", what).map(|took| took / 1000.0);
        entries.add(took.map(|took| row.entry(name, "s", Better::Lower, took, ("bound", bound))));
    }
    let told = of("ours-auto", "told-32-ms").map(|told| told / 1000.0);
    entries.add(told.map(|told| row.entry("recovery-32x4/told", "s", Better::Lower, told, ("bound", 5.0))));
    for (name, few, many) in LINEAR {
        let entry = || {
            let (few, many) = (of("ours-auto", few)? / 8.0, of("ours-auto", many)? / 32.0);
            Ok(row.entry(name, "ms each", Better::Lower, many, ("8 devices", few)))
        };
        entries.add(entry());
    }
    entries.end(failure, &mut bench.problems)
}

fn inside(ringdisk: &Path, place: Place, pairs: u32, seconds: f64) -> io::Result<(Said, Option<String>)> {
    let lab = Lab::prepare().map_err(failed)?;
    let lab = lab.with_kernel(place.kernel).map_err(failed)?;
    let scratch = Scratch::new().map_err(failed)?;
    let rublk = std::env::var_os("RUBLK").filter(|path| !path.is_empty());
    let rublk = rublk.map_or_else(|| PathBuf::from("target/bench/peers/bin/rublk"), PathBuf::from);
    let toolbox = Toolbox::with(&lab, &scratch, ringdisk)
        .and_then(|toolbox| toolbox.program(&rublk, "rublk"))
        .and_then(|toolbox| toolbox.program(Path::new("/usr/bin/qemu-nbd"), "qemu-nbd"))
        .map_err(failed)?;
    let whom = place.whom();
    let rounds = (f64::from(pairs) * seconds).ceil();
    let script = format!(
        "rounds={rounds:.0}\nwhom='{whom}'\n{PREPARE}\nturns\nfor again in $(seq {pairs}); do recover; done\n\
         rm -f *.qcow2\nfor again in 1 2 3; do many 8; many 32; done\n"
    );
    let nested = Nested {
        lab: &lab,
        scratch: &scratch,
        toolbox: &toolbox,
        bytes: DISK_BYTES,
        script: &script,
        patience: PATIENCE,
    };
    said::run(place.row, &nested)
}
