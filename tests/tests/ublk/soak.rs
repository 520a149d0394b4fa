//! Devices that come, work, are killed, go on and go, again and again; and a server that works through all of it, and must
//! not grow. `make soak-ublk SECONDS=…` does it for as long as it is told.

use std::time::Duration;

use super::{on_each, run_in, said};
use lab::{Error, Scratch};

/// How long it takes in each kernel unless it is told, in seconds.
const SHORT: u64 = 10;
/// What the long-lived server's memory may grow by, in KiB: its allocator's doing.
const GROWTH_KIB: u64 = 6 << 10;

const SOAK: &str = r#"
# grown WHEN: what the long-lived server has.
grown() {
    # Without shared memory, which is not the allocator's.
    rss=$(awk '/^Rss(Anon|File)/ { sum += $2 } END { print sum }' /proc/$keeper/status)
    echo "grown $1 rss $rss files $(ls /proc/$keeper/fd | wc -l) threads $(ls /proc/$keeper/task/*/comm |
        xargs grep -L '^iou-' | wc -l)"
}
for name in kept a b; do ringdisk image create -o cluster_size=16k $name.qcow2 64M >/dev/null; done
truncate -s 64M r.raw
add keeper add --disk path=kept.qcow2,num_queues=2 path=r.raw,image_type=raw --id 10
keeper=$server
cycle=0 kills=0 began=$(awk '{ print int($1) }' /proc/uptime)
until [ $cycle -ge 4 ] && [ $(($(awk '{ print int($1) }' /proc/uptime) - began)) -ge $seconds ]; do
    [ $cycle != 1 ] || grown before
    set -- $transports
    shift $((cycle % $#))
    how="--id 1 --transport $1 --queues-per-worker $((cycle % 2 + 1))"
    # Those that live long: what they hold changes kind all the time.
    verify /dev/ublkb10 --randseed=$cycle --numjobs=2 --offset_increment=24m --size=12m
    blkdiscard -o $((cycle % 40))M -l 20M /dev/ublkb10
    verify /dev/ublkb11 --randseed=$cycle --size=8m
    for ask in 1 2 3; do ringdisk ublk info 10 >/dev/null; done
    # And those that come and go.
    add cycle add --disk path=a.qcow2,num_queues=2 path=b.qcow2,queue_size=32 $how
    fio --name=load --filename=/dev/ublkb1 --ioengine=libaio --iodepth=16 --direct=1 --bsrange=4k-64k --rw=randwrite --size=12m \
        --verify=xxhash --verify_fatal=1 --do_verify=1 --randseed=$cycle --eta=never --output=/tmp/load & load=$!
    case $((cycle % 3)) in
    0 | 1)
        for again in 1 2; do
            sleep 0.$((cycle % 7 + 1))
            kill -9 $server
            wait $server 2>/dev/null || true
            kills=$((kills + 1))
            add cycle recover 1 2
        done
        ;;
    esac
    wait $load || { echo "data lost"; cat /tmp/load; exit 1; }
    verify /dev/ublkb2 --randseed=$cycle --size=4m
    if [ $((cycle % 2)) = 0 ]; then ringdisk ublk del 1 2; else kill $server; fi
    wait $server || { echo "server failed"; cat cycle.err; exit 1; }
    sound a.qcow2 >/dev/null
    sound b.qcow2 >/dev/null
    cycle=$((cycle + 1))
done
grown after
kill $keeper
wait $keeper && echo "keeper 0"
check kept.qcow2
ringdisk ublk list | wc -l | sed 's/^/left /'
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'
echo "soaked $cycle cycles, $kills kills, in $(($(awk '{ print int($1) }' /proc/uptime) - began)) s"
"#;

/// The numbers of a line.
fn numbers(line: &str) -> Vec<u64> {
    line.split(' ').filter_map(|word| word.parse().ok()).collect()
}

#[test]
#[expect(
    clippy::print_stdout,
    reason = "what was counted is what somebody who soaks wants to know"
)]
fn a_soak_of_devices_loses_no_data_and_a_server_does_not_grow() -> Result<(), Error> {
    let seconds = std::env::var("RINGDISK_SOAK_SECONDS").ok();
    let seconds: u64 = seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(SHORT);
    on_each(|kernel, lab| {
        let scratch = Scratch::new()?;
        let script = format!("seconds={seconds}\n{SOAK}");
        let patience = Duration::from_secs(480 + 2 * seconds);
        let outcome = run_in(lab, &scratch, 2, &script, Ok, |guest| guest.patience(patience))?;
        let all = said(&outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let (before, after) = (numbers(value("grown before ")), numbers(value("grown after ")));
        println!("{kernel:?}: {}; {before:?} to {after:?}", value("soaked "));
        let ([rss, files, threads], [rss_after, files_after, threads_after]) = (&before[..], &after[..])
        else {
            panic!("no numbers: {all}");
        };
        assert!(
            *rss_after <= rss + GROWTH_KIB,
            "memory in KiB: {rss} to {rss_after}: {all}"
        );
        assert_eq!(
            (files, threads),
            (files_after, threads_after),
            "descriptors and threads: {all}"
        );
        for (key, wanted) in [("keeper ", "0"), ("left ", "0"), ("remembered ", "0")] {
            assert_eq!(value(key), wanted, "{key}: {all}");
        }
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
        Ok(())
    })
}
