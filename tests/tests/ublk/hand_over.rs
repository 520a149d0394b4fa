//! Hand-overs that do not go as they should: a successor that dies when the old server has left already, one of several
//! servers that dies meanwhile, I/O of the old server that takes long, servers that hand over in another way. Devices wait,
//! nobody sees an error, and nothing of an old server comes after the new one.

use lab::{Error, Kernel, Outcome};

use super::{on_both, said};

/// Three servers with three devices each. The images of the second one are on a file system that can be frozen: what is
/// written to them is under way then, in the kernel, until it thaws.
const SERVERS: &str = r#"
modprobe loop
truncate -s 320M /tmp/slow.ext4
mkfs.ext4 -q /tmp/slow.ext4
mkdir -p /run/slow
mount -o loop /tmp/slow.ext4 /run/slow
disk() { case $1 in [345]) echo path=/run/slow/i$1.qcow2 ;; *) echo path=i$1.qcow2 ;; esac; }
image() { disk $1 | sed 's/path=//'; }
for id in 0 1 2 3 4 5 6 7 8; do ringdisk image create -o cluster_size=16k $(image $id) 48M >/dev/null; done
# Processes that were not waited for count as dead.
alive() { case "$(sed 's/.*) //' /proc/$1/stat 2>/dev/null)" in '' | [ZX]*) return 1 ;; esac; }
pid_of() { ringdisk ublk info $1 --json | sed 's/.*"pid":\([0-9]*\).*/\1/'; }
# served NAME PID: how many devices this process serves.
served() {
    count=0
    for id in 0 1 2 3 4 5 6 7 8; do
        [ "$(pid_of $id)" != $2 ] || ! ringdisk ublk info $id | grep -q ' live ' || count=$((count + 1))
    done
    echo "served $1 $count"
}
state_of() { ringdisk ublk list | awk -v dev=/dev/ublkb$1 '$1 == dev { print $2 }'; }
# soon COMMAND…: waits until it succeeds.
soon() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 600 ] || { echo "in vain: $*"; cat *.err; exit 1; }
        sleep 0.05
    done
}
# up NAME PID: this server says that its devices are there.
said() { [ -s $1.out ] || ! alive $2; }
up() {
    soon said $1 $2
    [ -s $1.out ] || { echo "no device:"; cat $1.err; exit 1; }
    server=$2
}
# loaded: nothing has failed so far.
loaded() { [ -d /proc/$load ] || { echo "no load"; cat /tmp/fio* *.err; exit 1; }; }
# three NAME ARGUMENTS…: leaves the servers' numbers in $a, $b, $c.
three() {
    name=$1
    shift
    add $name.a "$@" 0 1 2 && a=$server
    add $name.b "$@" 3 4 5 && b=$server
    add $name.c "$@" 6 7 8 && c=$server
}
add first.a add --id 0 --disk $(disk 0),num_queues=2 $(disk 1) $(disk 2) && a=$server
add first.b add --id 3 --disk $(disk 3) $(disk 4) $(disk 5) && b=$server
add first.c add --id 6 --disk $(disk 6) $(disk 7) $(disk 8) --queues-per-worker 2 && c=$server

jobs=
for id in 0 1 2 3 4 5 6 7 8; do jobs="$jobs --name=d$id --filename=/dev/ublkb$id"; done
fio --name=global --ioengine=libaio --iodepth=8 --direct=1 --rw=randwrite --bsrange=4k-32k --size=8m --rate_iops=40 \
    --verify=xxhash --verify_backlog=50 --verify_fatal=1 --do_verify=1 --time_based --runtime=1200 --allow_file_create=0 \
    --eta=never --output=/tmp/fio $jobs & load=$!
sleep 2

# All of several servers, at once.
add next upgrade --all
for old in $a $b $c; do wait $old && echo "left"; done
served several $server
loaded

# The successor waits for an image that somebody else has, as a slow one might, and dies.
cat >hold.pl <<'END'
# As a program does that does not bear others to write.
open my $image, '<', $ARGV[0] or die $!;
my $lock = pack 's s x4 q q l x4', 0, 0, 201, 1, 0;
fcntl $image, 6, $lock or die $!;
open my $held, '>', 'held' or die $!;
sleep 1000;
END
perl hold.pl i0.qcow2 & holder=$!
soon [ -e held ]
old=$server
/mnt/ringdisk --log info ublk upgrade --all >dead.out 2>dead.err & dead=$!
wait $old && echo "orphaned by $old"
kill -9 $dead
wait $dead || true
all_wait() { [ "$(ringdisk ublk list | grep -c ' quiesced ')" = 9 ]; }
soon all_wait
ringdisk ublk list | awk '{ print $2 }' | sort | uniq -c | tr -s ' \n' ' ' | sed 's/^/unserved /'
echo
loaded
ended upgraded ringdisk ublk upgrade 0
kill $holder
wait $holder || true
three again recover
served a $a
served b $b
served c $c
loaded
"#;

const DEATHS: &str = r#"
# What is under way takes long, and of three servers one dies meanwhile.
# letters LETTER: 64 KiB of it, in a file of this name.
letters() { head -c 64k /dev/zero | tr '\0' $1 >$1; }
letters A
letters B
letters C
put() { dd if=$1 of=/dev/ublkb3 bs=64k seek=500 count=1 oflag=direct status=none; }
holds() { dd if=/dev/ublkb3 bs=64k skip=500 count=1 iflag=direct status=none | cmp - $1 && echo "holds $1 $2"; }
fsfreeze -f /run/slow
put A & writer=$!
sleep 1
/mnt/ringdisk --log info ublk upgrade --all >slow.out 2>slow.err & slow=$!
wait $a && echo "slow left"
early=0
for step in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    # One descriptor for each image came with its lock. Whoever opens one has more.
    [ $(ls -l /proc/$slow/fd | grep -c /run/slow) -le 3 ] || early=1
    [ $step != 10 ] || kill -9 $c
    sleep 0.1
done
wait $c || true
echo "early $early"
alive $b && alive $slow && [ -d /proc/$writer ] && [ "$(pid_of 3)" = $b ] && echo "slow waits"
fsfreeze -u /run/slow
wait $writer && echo "slow written"
wait $b && echo "slow left"
up slow $slow
holds A slow
put B
sleep 1
holds B slow
if [ "$(pid_of 6)" = $slow ] && [ "$(state_of 6)" = live ]; then
    echo "lost taken"
else
    grep -q 'goes on without' slow.err && echo "lost refused"
    last=$server
    add last recover 6 7 8
    kill -9 $last $server
    wait $last || true
    wait $server || true
    add all recover --all
fi
served all $server
loaded

# A server that is killed with writes under way: its successor waits for them.
fsfreeze -f /run/slow
put C & writer=$!
sleep 1
kill -9 $server
/mnt/ringdisk --log info ublk recover --all >killed.out 2>killed.err & killed=$!
sleep 3
! [ -s killed.out ] && alive $killed && echo "killed waits"
fsfreeze -u /run/slow
wait $server || true
up killed $killed
wait $writer && echo "killed written"
holds C killed
served killed $server
loaded

# Successors that die soon after the old server has left, whatever they are about.
for ms in 000 020 060 150 300; do
    old=$server
    /mnt/ringdisk --log info ublk upgrade --all >dead.out 2>dead.err & dead=$!
    wait $old && echo "left"
    sleep 0.$ms
    kill -9 $dead
    wait $dead || true
    ringdisk ublk list | awk '{ print $2 }' | sort | uniq -c | tr -s ' \n' ' ' | sed "s/^/after $ms /"
    echo
    add again recover --all
    served $ms $server
    loaded
done

# A server that hands over in another way; one that is asked in another way goes on.
cat >other.pl <<'END'
use IO::Socket::UNIX;
my ($path, $answer, $left) = @ARGV;
my $socket = IO::Socket::UNIX->new(Local => $path, Listen => 5) or die $!;
while (my $client = $socket->accept) {
    while (<$client>) { print $client /hand-over/ ? $left : $answer, "\n"; $client->flush }
}
END
cat >ask.pl <<'END'
use IO::Socket::UNIX;
my ($path, $request) = @ARGV;
my $server = IO::Socket::UNIX->new(Peer => $path) or die $!;
print $server "$request\n";
$server->flush;
print scalar <$server>;
END
control=/run/ringdisk/ublk/server-$server.sock
perl other.pl /tmp/other '{"ok":true,"devices":[],"hand_over":2}' & other=$!
perl other.pl /tmp/older '{"ok":true,"devices":[]}' & older=$!
soon [ -S /tmp/other ]
soon [ -S /tmp/older ]
for kind in other older; do
    sed -i.kept "s|$control|/tmp/$kind|" /run/ringdisk/ublk/0.json
    ended $kind ringdisk ublk upgrade --all
    mv /run/ringdisk/ublk/0.json.kept /run/ringdisk/ublk/0.json
done
kill $other $older
perl ask.pl $control '{"command":"hand-over","version":2,"devices":[0,1,2,3,4,5,6,7,8]}' | sed 's/^/version /'
perl ask.pl $control '{"command":"hand-over","version":1,"devices":[0,1]}' | sed 's/^/part /'
served on $server

# What a service manager hears when it has the server replaced: of a successor that is refused, and of one that is not.
cat >hear.pl <<'END'
use IO::Socket::UNIX;
my $manager = IO::Socket::UNIX->new(Local => $ARGV[0], Type => SOCK_DGRAM) or die $!;
$| = 1;
while (defined $manager->recv(my $said, 1000)) { print "$said\n" }
END
perl hear.pl /tmp/notify >heard & hear=$!
perl other.pl /tmp/busy '{"ok":true,"devices":[],"hand_over":1}' '{"ok":false,"error":"not now"}' & busy=$!
soon [ -S /tmp/notify ]
soon [ -S /tmp/busy ]
reload() { env NOTIFY_SOCKET=/tmp/notify /mnt/ringdisk ublk upgrade --server $server --daemonize; }
sed -i.kept "s|$control|/tmp/busy|" /run/ringdisk/ublk/0.json
ended busy reload
mv /run/ringdisk/ublk/0.json.kept /run/ringdisk/ublk/0.json
served kept $server
ended reload reload
wait $server && echo "gone reload"
old=$server
server=$(pid_of 0)
heard() { grep -q READY heard; }
soon heard
sed "s/=$old\$/=OLD/; s/=$server\$/=NEW/; s/=[0-9][0-9]*\$/=OTHER/; s/READY=.*/READY/" heard | tr '\n' ' ' | sed 's/^/heard /'
echo
sed -n 's/^PPid:[^0-9]*/parent /p' /proc/$server/status
served reloaded $server
ended nobody ringdisk ublk upgrade --server $old
kill $hear $busy
loaded
# The last one is the shell's own again.
add last upgrade --server $server

kill -INT $load
wait $load || [ $? = 128 ] || { cat /tmp/fio *.err; exit 1; }
! grep -E 'err= *[1-9]|verify:|error' /tmp/fio || { cat /tmp/fio; exit 1; }
echo "load 0"
holds C end
for id in 0 1 2 3 4 5 6 7 8; do kept /dev/ublkb$id kept.$id; done
# What the host knows of a disk, and what its workers may wait for when memory is short.
limits="logical_block_size max_hw_sectors_kb dma_alignment optimal_io_size discard_granularity fua chunk_sectors"
for name in $limits write_cache; do echo "$name $(cat /sys/block/ublkb0/queue/$name)"; done | tr '\n' ' ' | sed 's/^/limits /'
echo
# Those that were killed had made it shorter.
cat /sys/block/ublkb*/queue/io_timeout | sort | uniq -c | tr -s ' \n' ' ' | sed 's/^/timeouts/'
echo
for task in /proc/$server/task/*; do
    case $(cat $task/comm) in
    ublk*)
        set -- $(sed 's/.*) //' $task/stat)
        # PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE.
        [ $(($7 & 0x180000)) = $((0x180000)) ] && echo flusher || echo "waits for itself: $7"
        ;;
    esac
done | sort | uniq -c | tr -s ' \n' ' ' | sed 's/^/workers/'
echo
kill $server
wait $server && echo "server 0"
for id in 0 1 2 3 4 5 6 7 8; do
    sound $(image $id)
    same kept.$id $(image $id) $id
done

# Recovered again, and removed, when a recovery has begun and its server has died.
for ms in 050 100 200; do
    add gone add --id 0 --disk $(disk 0),num_queues=2 $(disk 1)
    kill -9 $server
    wait $server || true
    /mnt/ringdisk ublk recover --all >/dev/null 2>&1 & dead=$!
    sleep 0.$ms
    kill -9 $dead
    wait $dead || true
    ended resumed ringdisk ublk recover --all --daemonize
    ended removed ringdisk ublk del --all --force
done
ringdisk ublk list | wc -l | sed 's/^/remaining /'
sound $(image 0)

# A device that goes with its server has no request wait for one.
dmesg | grep -c 'I/O error' | sed 's/^/errors /' || true
add off add --id 0 --disk $(disk 0),ops_size=1,ops_refill_time=60000 --recovery off
looks=
for n in 1 2 3; do
    dd if=/dev/ublkb0 of=/dev/null bs=4k count=1 skip=$n iflag=direct status=none 2>/dev/null & looks="$looks $!"
done
sleep 1
kill -9 $server
wait $server || true
began=$(date +%s)
failed=0
for look in $looks; do wait $look || failed=$((failed + 1)); done
echo "failed $failed in $(($(date +%s) - began)) s"
"#;

fn count(outcome: &Outcome, wanted: &str) -> usize {
    outcome.lines().filter(|line| line.starts_with(wanted)).count()
}

#[test]
fn devices_wait_for_a_server_whatever_becomes_of_the_successor_and_no_write_comes_late() -> Result<(), Error>
{
    on_both(&format!("{SERVERS}{DEATHS}"), |kernel, outcome| {
        let all = said(outcome);
        let once = |line: &str| assert_eq!(count(outcome, line), 1, "{line}: {all}");
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        let moments = ["000", "020", "060", "150", "300"];
        assert_eq!(count(outcome, "left"), 3 + moments.len(), "{all}");
        for (name, devices) in [
            ("several", 9),
            ("a", 3),
            ("b", 3),
            ("c", 3),
            ("all", 9),
            ("killed", 9),
            ("on", 9),
        ] {
            once(&format!("served {name} {devices}"));
        }
        for ms in moments {
            once(&format!("served {ms} 9"));
        }
        once("orphaned by ");
        assert_eq!(value("unserved ").trim(), "9 quiesced", "{all}");
        let told = value("upgraded ");
        assert!(
            told.starts_with("1 ringdisk: /dev/ublkb0 has no server that could hand it over"),
            "{told}"
        );

        // Nothing of the new server came before the end of the old one, nor of the old one after.
        once("early 0");
        assert_eq!(count(outcome, "slow left"), 2, "{all}");
        for line in [
            "slow waits",
            "slow written",
            "holds A slow",
            "holds B slow",
            "lost ",
        ] {
            once(line);
        }
        for line in ["killed waits", "killed written", "holds C killed", "holds C end"] {
            once(line);
        }

        for key in ["other ", "older "] {
            let told = value(key);
            assert!(told.starts_with("1 ringdisk: process "), "{key}: {told}");
            assert!(
                told.contains("is of a version that does not hand over as this one does"),
                "{key}: {told}"
            );
        }
        let refused = r#""ok":false"#;
        assert!(
            value("version ").contains("hands devices over in version 1, and was asked in version 2"),
            "{all}"
        );
        assert!(
            value("version ").contains(refused) && value("part ").contains(refused),
            "{all}"
        );

        assert!(
            value("busy ").starts_with("1 ") && value("busy ").contains("not now"),
            "{all}"
        );
        once("served kept 9");
        assert!(
            value("reload ").starts_with("0 /dev/ublkb0 /dev/ublkb1 "),
            "{all}"
        );
        once("gone reload");
        // Whoever fails with devices that were left to it is the service that has failed.
        let heard = value("heard ").trim();
        assert_eq!(heard, "MAINPID=OTHER MAINPID=OLD MAINPID=NEW READY", "{all}");
        assert_eq!(value("parent "), "1", "a manager hears of its end: {all}");
        once("served reloaded 9");
        assert!(
            value("nobody ").starts_with("1 ringdisk: process ")
                && value("nobody ").contains("serves no device"),
            "{all}"
        );

        once("load 0");
        once("server 0");
        assert_eq!(
            (count(outcome, "same "), count(outcome, "sound ")),
            (9, 10),
            "{all}"
        );
        // Drivers before 6.15 are not told of the alignment of memory.
        let align = if kernel == Kernel::V6_12 { 3 } else { 511 };
        let limits = format!(
            "logical_block_size 512 max_hw_sectors_kb 1024 dma_alignment {align} optimal_io_size 16384 \
             discard_granularity 16384 fua 1 chunk_sectors 0 write_cache write back"
        );
        assert_eq!(value("limits ").trim(), limits, "{all}");
        assert_eq!(value("timeouts ").trim(), "9 30000", "{all}");
        let workers = value("workers ").trim();
        let all_are = workers
            .strip_suffix(" flusher")
            .and_then(|count| count.parse::<usize>().ok());
        assert!(all_are.is_some_and(|count| count >= 9), "{workers}: {all}");
        assert_eq!(
            (count(outcome, "removed 0"), count(outcome, "remaining 0")),
            (3, 1),
            "{all}"
        );
        assert_eq!(count(outcome, "resumed 0 "), 3, "{all}");
        once("errors 0");
        let failed = value("failed ")
            .strip_suffix(" s")
            .and_then(|told| told.split_once(" in "));
        let (failed, seconds) = failed.unwrap_or_else(|| panic!("{all}"));
        assert!(["2", "3"].contains(&failed), "one may have been answered: {all}");
        assert!(seconds.parse::<u64>().is_ok_and(|seconds| seconds < 15), "{all}");
        // Those three were told.
        let told = |line: &&&str| !(line.contains("I/O error") && line.contains("dev ublkb0"));
        let complaints = outcome.complaints();
        let others: Vec<_> = complaints.iter().filter(told).collect();
        assert!(others.is_empty(), "{others:?}: {}", outcome.console());
    })
}
