//! Many devices of one server, killed and recovered with I/O under way; a server that fails to recover; what I/O sees in each
//! mode of recovery; and commands that hang in the kernel.

use super::{run_in, said};
use lab::{Error, Kernel, Lab, Outcome, Scratch};

/// What the scripts measure with.
const CLOCK: &str = r#"
now() { echo $(($(date +%s%N) / 1000000)); }
# served LOG COUNT: waits for so many devices.
served() {
    tries=0
    until [ "$(wc -l <"$1.out")" = $2 ]; do
        tries=$((tries + 1))
        [ $tries -lt 1200 ] && [ -d /proc/$server ] || { echo "no devices:"; cat "$1.err"; exit 1; }
        sleep 0.05
    done
}
# state NAME: waits until so many devices are so.
state() {
    tries=0
    until [ "$(ringdisk ublk list --json | tr '{' '\n' | grep -c "\"state\":\"$1\"")" = $2 ]; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || { echo "not $1:"; ringdisk ublk list; exit 1; }
        sleep 0.1
    done
}
"#;

/// Sixteen devices with four queues each, all of them busy when the server is killed.
const MANY: &str = r#"
count=16
disks=
for n in $(seq 0 $((count - 1))); do
    ringdisk image create m$n.qcow2 16M >/dev/null
    disks="$disks path=m$n.qcow2,num_queues=4,queue_size=128"
done
for how in $transports; do
    began=$(now)
    add many add --disk $disks --queues-per-worker 4 --transport $how
    served many $count
    echo "added $how $(($(now) - began)) ms"
    ringdisk ublk info 0 --json | sed 's/^/info /'
    loads=
    for n in $(seq 0 $((count - 1))); do
        fio --name=load --filename=/dev/ublkb$n --size=8m --rw=randwrite --bs=4k --iodepth=32 --direct=1 --ioengine=libaio \
            --verify=xxhash --verify_fatal=1 --do_verify=1 --time_based --runtime=8 --eta=never --output=/tmp/fio.$n & loads="$loads $!"
    done
    sleep 3
    began=$(now)
    kill -9 $server
    wait $server || true
    state quiesced $count
    echo "quiesced $how $(($(now) - began)) ms"
    began=$(now)
    add again recover --all --queues-per-worker 4
    served again $count
    echo "recovered $how $(($(now) - began)) ms"
    good=0
    for load in $loads; do
        wait $load && good=$((good + 1))
    done
    echo "loads $how $good"
    [ $good = $count ] || { cat /tmp/fio.*; exit 1; }
    n=3
    kept /dev/ublkb$n kept.raw
    began=$(now)
    kill $server
    wait $server && echo "closed $how $(($(now) - began)) ms"
    for n in $(seq 0 $((count - 1))); do sound m$n.qcow2 >/dev/null; done
    same kept.raw m3.qcow2 $how
done
ringdisk ublk list | wc -l | sed 's/^/left /'

# Recovered all, or none: one whose image is another leaves those before it as they were.
ringdisk image create small.qcow2 8M >/dev/null
add two add --disk path=m0.qcow2,num_queues=4 path=m1.qcow2,num_queues=4
served two 2
kill -9 $server
wait $server || true
state quiesced 2
dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 iflag=direct status=none & waiting=$!
ended other ringdisk ublk recover 0 1 --disk path=m0.qcow2 path=small.qcow2
state quiesced 2
[ -d /proc/$waiting ] && echo "still waiting"
add again recover --all
served again 2
wait $waiting && echo "answered"
kill $server
wait $server && echo "server 0"
"#;

/// What I/O sees in the modes that do nothing again.
const MODES: &str = r#"
ringdisk image create q.qcow2 64M >/dev/null
modes="wait"
! ringdisk ublk features | grep -q USER_RECOVERY_FAIL_IO || modes="$modes fail"
echo "modes $modes"
look() { dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 skip=$1 iflag=direct status=none; }
for mode in $modes; do
    # So slow that some requests are at the server for long.
    add mode add --disk path=q.qcow2,num_queues=2,ops_size=2,ops_refill_time=4000 --recovery $mode
    looks=
    for n in 1 2 3 4 5 6 7 8; do
        look $n 2>/dev/null & looks="$looks $!"
    done
    sleep 1
    kill -9 $server
    wait $server || true
    failed=0
    for look in $looks; do wait $look || failed=$((failed + 1)); done
    echo "failed $mode $failed"
    case $mode in
    wait)
        state quiesced 1
        look 20 & late=$!
        sleep 2
        [ -d /proc/$late ] && echo "waits $mode"
        ;;
    fail)
        state failing 1
        ended "refused $mode" look 20
        ;;
    esac
    add again recover 0 --disk path=q.qcow2,num_queues=2
    [ $mode = fail ] || { wait $late && echo "then $mode"; }
    look 20 && echo "good $mode"
    verify /dev/ublkb0
    kill $server
    wait $server && echo "server $mode"
    check q.qcow2
done
"#;

/// A command that the kernel holds, because a server does not answer.
const HANG: &str = r#"
ringdisk image create q.qcow2 64M >/dev/null
add hung add --disk path=q.qcow2
kill -STOP $server
dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null & reader=$!
sleep 1
began=$(now)
(ended del ringdisk ublk del 0 --force) & del=$!
sleep 15
(ended list ringdisk ublk list) & list=$!
wait $list
wait $del
echo "ended after $(($(now) - began)) ms"
# What carried the commands out goes when the kernel lets it, and so does the device.
kill -CONT $server
wait $reader || true
wait $server && echo "server 0"
tries=0
while [ -e /dev/ublkc0 ] && [ $tries -lt 100 ]; do tries=$((tries + 1)); sleep 0.1; done
ringdisk ublk del --all
ringdisk ublk list | wc -l | sed 's/^/left /'
add after add --disk path=q.qcow2
kill $server
wait $server && echo "after 0"
check q.qcow2
"#;

/// Runs `script` in a guest with so many CPUs: the driver makes no more queues than that.
fn on(lab: &Lab, cpus: u16, script: &str) -> Result<Outcome, Error> {
    let scratch = Scratch::new()?;
    let script = format!("{CLOCK}{script}");
    run_in(lab, &scratch, cpus, &script, Ok, |guest| guest)
}

fn on_both(cpus: u16, script: &str, judge: impl Fn(Kernel, &Outcome) + Sync) -> Result<(), Error> {
    super::on_each(|kernel, lab| {
        judge(kernel, &on(lab, cpus, script)?);
        Ok(())
    })
}

/// The milliseconds of a line that begins with `key`.
fn ms(outcome: &Outcome, key: &str) -> u64 {
    let value = outcome.value(key).and_then(|value| value.split(' ').next());
    value
        .and_then(|value| value.parse().ok())
        .unwrap_or_else(|| panic!("no {key:?}: {}", said(outcome)))
}

/// The bounds are for machines that do other things too; `make bench` measures.
#[test]
fn many_busy_devices_are_recovered_together_and_soon() -> Result<(), Error> {
    on_both(4, MANY, |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        assert!(
            outcome
                .value("info ")
                .is_some_and(|info| info.contains(r#""queues":4"#)),
            "{all}"
        );
        for how in super::transports(kernel) {
            for (what, most) in [
                ("added", 20_000),
                ("quiesced", 30_000),
                ("recovered", 20_000),
                ("closed", 20_000),
            ] {
                let took = ms(outcome, &format!("{what} {how} "));
                assert!(took < most, "{what} {how}: {took} ms: {all}");
            }
            assert_eq!(count(&format!("loads {how} 16")), 1, "{all}");
            assert_eq!(count(&format!("same {how}")), 1, "{all}");
        }
        assert_eq!(outcome.value("left "), Some("0"), "{all}");
        let other = outcome.value("other ").unwrap_or_default();
        assert!(
            other.starts_with("1 ringdisk: ") && other.contains("is it the right image?"),
            "{all}"
        );
        assert_eq!(
            (count("still waiting"), count("answered"), count("server 0")),
            (1, 1, 1),
            "{all}"
        );
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}

#[test]
fn io_fails_or_waits_without_a_server_as_its_mode_says() -> Result<(), Error> {
    on_both(2, MODES, |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        let modes: &[&str] = if kernel == Kernel::V7 {
            &["wait", "fail"]
        } else {
            &["wait"]
        };
        assert_eq!(outcome.value("modes "), Some(modes.join(" ").as_str()), "{all}");
        for mode in modes {
            assert!(
                ms(outcome, &format!("failed {mode} ")) > 0,
                "what was under way fails: {all}"
            );
            assert_eq!(
                (count(&format!("good {mode}")), count(&format!("server {mode}"))),
                (1, 1),
                "{all}"
            );
        }
        assert_eq!((count("waits wait"), count("then wait")), (1, 1), "{all}");
        if kernel == Kernel::V7 {
            let refused = outcome.value("refused fail ").unwrap_or_default();
            assert!(
                refused.starts_with("1 ") && refused.contains("I/O error"),
                "{all}"
            );
        }
        assert_eq!(count("flawless"), modes.len(), "{all}");
        // Whoever was failed is told so; nothing else went wrong.
        let told = |line: &&&str| !(line.contains("I/O error") && line.contains("dev ublkb"));
        let complaints = outcome.complaints();
        let others: Vec<_> = complaints.iter().filter(told).collect();
        assert!(others.is_empty(), "{others:?}");
    })
}

/// A removal waits in the kernel for a server that has stopped answering, and whoever else asks for the device waits for
/// the removal. Neither can be killed there; the programs end all the same.
#[test]
fn a_program_whose_command_hangs_in_the_kernel_says_so_and_ends() -> Result<(), Error> {
    on_both(2, HANG, |_, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        for (who, command, seconds) in [("del", "STOP_DEV", 60), ("list", "GET_PARAMS", 20)] {
            let told = outcome.value(&format!("{who} ")).unwrap_or_default();
            let line = format!("1 ringdisk: {command} of /dev/ublkb0 failed (the kernel hangs: see its log");
            assert!(told.starts_with(&line), "{who}: {all}");
            assert!(
                told.contains(&format!("no answer in {seconds} s")),
                "{who}: {all}"
            );
        }
        assert!(ms(outcome, "ended after ") < 90_000, "{all}");
        assert_eq!(
            (count("server 0"), count("left 0"), count("after 0")),
            (1, 1, 1),
            "{all}"
        );
        assert_eq!(count("flawless"), 1, "{all}");
    })
}
