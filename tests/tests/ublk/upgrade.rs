//! Devices that go from server to server while they are used: no request fails, nothing is lost, and the kernel has nothing to
//! complain of.

use lab::{Error, Kernel};

use super::{on_both, said, transports, zero_copy};

/// Servers that follow each other under load, one device with every tag of its queues taken all the time.
const RELAY: &str = r#"
# upgrade LOG ARGUMENTS…: has another server go on, and waits for the old one.
upgrade() {
    old=$server
    began=$(date +%s%N)
    add "$@"
    took=$((($(date +%s%N) - began) / 1000000))
    status=0
    wait $old || status=$?
    [ $status = 0 ] || { echo "the old server ended with $status"; cat *.err; exit 1; }
    sed -n 's/.*took over.* ms=\([0-9]*\).*/paused \1 ms/p' "$1.err"
}
for transport in $transports; do
    rm -f q.qcow2 r.raw
    ringdisk image create -o cluster_size=16k q.qcow2 192M >/dev/null
    truncate -s 64M r.raw
    add first add --disk path=q.qcow2,num_queues=2 path=r.raw,image_type=raw,num_queues=2,queue_size=8 --transport $transport
    fio --name=sparse --filename=/dev/ublkb0 --size=96m --numjobs=2 --offset_increment=96m --rw=randwrite --bsrange=4k-64k \
        --ioengine=libaio --iodepth=24 --direct=1 --fsync=64 --verify=xxhash --verify_backlog=200 --verify_fatal=1 --do_verify=1 \
        --time_based --runtime=300 --allow_file_create=0 --eta=never --output=/tmp/fio.0 & sparse=$!
    fio --name=full --filename=/dev/ublkb1 --size=24m --numjobs=2 --offset_increment=32m --rw=randwrite --bsrange=4k-128k \
        --ioengine=libaio --iodepth=24 --direct=1 --verify=xxhash --verify_backlog=100 --verify_fatal=1 --do_verify=1 \
        --time_based --runtime=300 --allow_file_create=0 --eta=never --output=/tmp/fio.1 & full=$!
    case $transport in user-copy) rounds=10 ;; zero-copy) rounds=10 ;; *) rounds=3 ;; esac
    round=0
    while [ $round -lt $rounds ]; do
        round=$((round + 1))
        sleep 0.4
        [ -d /proc/$sparse ] && [ -d /proc/$full ] || { echo "no load"; cat /tmp/fio.*; cat *.err; exit 1; }
        case $round in
        1) upgrade next upgrade 0 1 --json && sed 's/^/made /' next.out ;;
        *) upgrade next upgrade --all ;;
        esac
        echo "upgraded $transport $round in $took ms"
    done
    ringdisk ublk info 0 --json | sed "s/^/info $transport /"
    kill -INT $sparse $full
    for load in $sparse $full; do
        wait $load || [ $? = 128 ] || { echo "load failed: $?"; cat /tmp/fio.*; cat *.err; exit 1; }
    done
    ! grep -E 'err= *[1-9]|verify:|error' /tmp/fio.* || { cat /tmp/fio.*; exit 1; }
    echo "load $transport 0"
    sed -n "s/.* clat (\([mun]*sec\)): .*max= *\([0-9.kM]*\),.*/latency $transport \2 \1/p" /tmp/fio.0 /tmp/fio.1
    cat /sys/block/ublkb1/queue/io_timeout | sed "s/^/timeout $transport /"
    verify /dev/ublkb1
    kept /dev/ublkb0 kept.0
    kept /dev/ublkb1 kept.1
    kill $server
    wait $server && echo "server $transport 0"
    check q.qcow2
    same kept.0 q.qcow2 "$transport 0"
    same kept.1 r.raw "$transport 1"
done
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'
"#;

#[test]
fn servers_follow_each_other_under_load_and_nobody_notices() -> Result<(), Error> {
    on_both(RELAY, |kernel, outcome| {
        let all = said(outcome);
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        for &transport in transports(kernel) {
            let rounds = if transport == "copy" { 3 } else { 10 };
            assert_eq!(count(&format!("upgraded {transport} ")), rounds, "{all}");
            for line in [
                "load {} 0",
                "server {} 0",
                "same {} 0",
                "same {} 1",
                "timeout {} 30000",
            ] {
                assert_eq!(count(&line.replace("{}", transport)), 1, "{line}: {all}");
            }
            zero_copy::assert_in_force(transport, outcome);
        }
        let devices = transports(kernel).len();
        assert_eq!(count(r#"made {"#), 2 * devices, "{all}");
        assert_eq!(count("flawless q.qcow2"), devices, "{all}");
        assert_eq!(count("remembered 0"), 1, "{all}");
        // On a machine that emulates a slow one; a driver's own timeout would be 30 s.
        let paused = outcome
            .lines()
            .filter_map(|line| line.strip_prefix("paused ")?.strip_suffix(" ms"));
        let slow: Vec<&str> = paused
            .filter(|ms| ms.parse().map_or(true, |ms: u64| ms > 20_000))
            .collect();
        assert!(slow.is_empty(), "{slow:?}: {all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}

/// What keeps a server from being replaced, found before it is asked; and what does not.
const REFUSALS: &str = r#"
for name in a b c; do ringdisk image create $name.qcow2 64M >/dev/null; done
# works DEVICE: it is served, and by whom.
works() {
    dd if=/dev/urandom of=/dev/ublkb$1 bs=64k count=1 oflag=direct status=none
    [ "$(ringdisk ublk info $1 --json | grep -o '"pid":[0-9]*')" = "\"pid\":$2" ] && echo "works $1"
}
ended nothing ringdisk ublk upgrade 7
ended none ringdisk ublk upgrade --all
add one add --disk path=a.qcow2,num_queues=2 path=b.qcow2 --id 0 --queues-per-worker 2
one=$server
ended part ringdisk ublk upgrade 0
works 0 $one
mv b.qcow2 aside
ended missing ringdisk ublk upgrade 0 1
head -c 100 aside >b.qcow2
ended broken ringdisk ublk upgrade --all
mv aside b.qcow2
works 1 $one
kill -STOP $one
ended silent ringdisk ublk upgrade 0 1
kill -CONT $one
works 0 $one
mv /run/ringdisk/ublk/1.json aside
ended forgotten ringdisk ublk upgrade 0 1
mv aside /run/ringdisk/ublk/1.json
works 1 $one

# Into the background, from another folder.
(cd / && ringdisk ublk upgrade --all --daemonize) | tr '\n' ' ' | sed 's/^/background /'
echo
wait $one && echo "one 0"
two=$(ringdisk ublk info 0 --json | sed 's/.*"pid":\([0-9]*\).*/\1/')
works 0 $two
works 1 $two
ringdisk ublk info 0 --json | grep -o '"workers":[0-9]*' | sed 's/^/threads /'
# Nobody serves it any more.
kill -9 $two
while [ -d /proc/$two ]; do sleep 0.05; done
ended unserved ringdisk ublk upgrade 0 1
add three recover --all
works 0 $server
works 1 $server
ended deleted ringdisk ublk del --all
wait $server && echo "three 0"
check a.qcow2
check b.qcow2

recoveries=off
! ringdisk ublk features | grep -q USER_RECOVERY_FAIL_IO || recoveries="off fail"
for recovery in $recoveries; do
    add other add --disk path=c.qcow2 --id 3 --recovery $recovery
    ended $recovery ringdisk ublk upgrade 3
    works 3 $server
    ended deleted ringdisk ublk del 3
    wait $server
done
# A device whose I/O must not be done again.
add other add --disk path=c.qcow2,num_queues=2 --id 3 --recovery wait
if ringdisk ublk features | grep -q QUIESCE; then
    fio --name=load --filename=/dev/ublkb3 --size=24m --numjobs=2 --offset_increment=32m --rw=randwrite --bsrange=4k-64k \
        --ioengine=libaio --iodepth=200 --direct=1 --verify=xxhash --verify_backlog=100 --verify_fatal=1 --do_verify=1 \
        --time_based --runtime=8 --allow_file_create=0 --eta=never --output=/tmp/fio & load=$!
    for round in 1 2 3; do
        sleep 1
        old=$server
        add next upgrade 3
        wait $old && echo "wait upgraded"
    done
    wait $load || { cat /tmp/fio; exit 1; }
    echo "wait load 0"
else
    ended wait ringdisk ublk upgrade 3
    works 3 $server
fi
kill $server
wait $server && echo "four 0"
check c.qcow2
"#;

#[test]
fn what_keeps_a_server_from_being_replaced_is_said_and_it_goes_on() -> Result<(), Error> {
    on_both(REFUSALS, |kernel, outcome| {
        let all = said(outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let count = |wanted: &str| outcome.lines().filter(|line| line.starts_with(wanted)).count();
        let mut refusals = vec![
            ("nothing ", "there is no such device"),
            ("part ", "serves /dev/ublkb1 too, and hands over all or nothing"),
            ("missing ", "b.qcow2"),
            ("broken ", "b.qcow2"),
            ("silent ", "does not answer at"),
            ("forgotten ", "where that can be asked is not remembered"),
            ("unserved ", "/dev/ublkb0 has no server that could hand it over"),
            ("off ", "/dev/ublkb3 was made with --recovery off"),
        ];
        match kernel {
            Kernel::V6_12 => refusals.push(("wait ", "/dev/ublkb3 was made with --recovery wait")),
            Kernel::V7 => {
                refusals.push(("fail ", "/dev/ublkb3 was made with --recovery fail"));
                assert_eq!((count("wait upgraded"), count("wait load 0")), (3, 1), "{all}");
            }
        }
        for (key, text) in refusals {
            let told = value(key);
            assert!(
                told.starts_with("1 ringdisk: ") && told.contains(text),
                "{key}: {told}: {all}"
            );
        }
        assert!(value("none ").starts_with('0'), "{all}");
        assert_eq!(value("threads "), r#""workers":1"#, "{all}");
        assert_eq!(value("background "), "/dev/ublkb0 /dev/ublkb1 ", "{all}");
        for line in [
            "one 0",
            "three 0",
            "four 0",
            "flawless a.qcow2",
            "flawless b.qcow2",
            "flawless c.qcow2",
        ] {
            assert_eq!(count(line), 1, "{line}: {all}");
        }
        assert_eq!(count("works "), 10, "{all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}
