//! What an operator has around devices: names that stay, a command line that goes on where a killed server was, and
//! limits that devices share.

use super::{on_both, on_each, run_with, said};
use lab::{Error, Kernel, Outcome, Scratch};
use std::path::{Path, PathBuf};

const OPERATIONS: &str = r#"
for name in a b c d; do ringdisk image create $name.qcow2 256M >/dev/null; done
links() {
    for link in /dev/disk/by-id/*; do
        [ ! -L "$link" ] || echo "link $1 $(basename "$link") $(readlink "$link")"
    done
}

add links add --disk path=a.qcow2,serial=DATA "path=b.qcow2,serial=x y/z" path=c.qcow2
first=$server
links all
# In 1/100 s of a CPU.
io_wait() { awk '$1 == "cpu" { print $6 }' /proc/stat; }
sleep 1
idle=$(io_wait)
sleep 2
echo "io_wait $(($(io_wait) - idle))"
add other add --disk path=d.qcow2,serial=DATA
grep -o 'ublkb3 has no link.*' other.err | sed 's/^/told /'
kill $server
wait $server
kill -9 $first
wait $first || true
rm /dev/disk/by-id/*y*
add links recover --all
links again
ended deleted ringdisk ublk del 0
links fewer
kill $server
wait $server
links none

# The same command line, whatever became of the last server.
serve() { add same add --or-recover --id 7 --disk path=a.qcow2,num_queues=2,serial=DATA path=b.qcow2; }
serve
ended served ringdisk ublk add --or-recover --id 7 --disk path=a.qcow2,num_queues=2,serial=DATA
mkfs.ext4 -q /dev/disk/by-id/ringdisk-DATA
mount /dev/disk/by-id/ringdisk-DATA /run/mnt
fio --name=load --directory=/run/mnt --size=24m --numjobs=2 --rw=randwrite --bsrange=4k-64k --ioengine=libaio --iodepth=16 \
    --direct=1 --fsync=32 --fallocate=none --verify=xxhash --verify_fatal=1 --do_verify=1 --time_based --runtime=10 \
    --eta=never --output=/tmp/fio & load=$!
for round in 1 2 3; do
    sleep 2
    kill -9 $server
    [ $round != 3 ] || ended another ringdisk ublk add --or-recover --id 7 --disk path=d.qcow2
    # As a service manager does it: at once.
    serve
    echo "again $(tr '\n' ' ' <same.out)"
done
wait $load || { cat /tmp/fio; exit 1; }
echo "load 0"
links after
umount /run/mnt
e2fsck -fn /dev/ublkb7 >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 1; }
kill $server
wait $server && echo "server 0"
sound a.qcow2
# A device that went with its server leaves its number behind.
add gone add --or-recover --id 7 --disk path=a.qcow2 --recovery off
kill -9 $server
wait $server || true
tries=0
until ! [ -e /dev/ublkb7 ] || [ $tries -ge 300 ]; do tries=$((tries + 1)); sleep 0.1; done
ringdisk ublk list | sed 's/^/before /'
add gone add --or-recover --id 7 --disk path=a.qcow2 --recovery off
ringdisk ublk list | sed 's/^/after /'
kill $server
wait $server && echo "gone 0"

# Two devices, one limit.
now() { awk '{ print $1 }' /proc/uptime; }
sectors() { cat /sys/block/ublkb0/stat /sys/block/ublkb1/stat | awk '{ sum += $3 } END { print sum }'; }
# rate NAME: MiB in a second, of both together, over 5 s.
rate() {
    for dev in /dev/ublkb0 /dev/ublkb1; do
        fio --name=read --filename=$dev --size=200m --rw=randread --bs=64k --ioengine=libaio --iodepth=8 --direct=1 \
            --time_based --runtime=8 --allow_file_create=0 --eta=never --output=/tmp/fio.$(basename $dev) &
        eval "load_$(basename $dev)=$!"
    done
    sleep 2
    began=$(now)
    from=$(sectors)
    sleep 5
    echo "$began $(now) $from $(sectors)" | awk -v name=$1 '{ printf "rate %s %.2f\n", name, ($4 - $3) / 2048 / ($2 - $1) }'
    wait $load_ublkb0 $load_ublkb1
}
slow=id=slow,bw_size=800K,bw_refill_time=100
ended unknown ringdisk ublk add --disk path=c.qcow2,rate_limit_group=fast --rate-limit-group $slow
add shared add --disk path=c.qcow2,rate_limit_group=slow path=d.qcow2,rate_limit_group=slow --rate-limit-group $slow
rate together
kill -9 $server
wait $server || true
add shared recover --all
rate recovered
kill $server
wait $server && echo "shared 0"
"#;

#[test]
fn names_stay_one_command_line_is_enough_and_devices_share_limits() -> Result<(), Error> {
    on_both(OPERATIONS, |kernel, outcome| {
        let all = said(outcome);
        let lines = |key: &str| -> Vec<String> {
            let lines = outcome.lines().filter_map(|line| line.strip_prefix(key));
            lines.map(|line| line.trim().to_owned()).collect()
        };
        let both = [
            r"ringdisk-DATA ../../ublkb0",
            r"ringdisk-x\x20y\x2fz ../../ublkb1",
        ];
        assert_eq!(lines("link all "), both, "{all}");
        assert_eq!(lines("link again "), both, "made again: {all}");
        assert_eq!(
            lines("told "),
            ["ublkb3 has no link ringdisk-DATA: /dev/ublkb0 has the same serial number"],
            "{all}"
        );
        assert_eq!(lines("link fewer "), both[1..], "{all}");
        assert_eq!(lines("link none "), Vec::<String>::new(), "{all}");
        // Before Linux 6.15 whoever waits for a ring with a command in it counts as waiting for I/O.
        let io_wait: u32 = lines("io_wait ")[0].parse().unwrap_or(u32::MAX);
        assert!(
            kernel != Kernel::V7 || io_wait < 40,
            "an idle server waits for I/O: {all}"
        );
        assert_eq!(lines("link after "), ["ringdisk-DATA ../../ublkb7"], "{all}");

        let said = |key: &str, text: &str| {
            let found = lines(key);
            assert!(
                found.len() == 1 && found[0].contains(text),
                "{key}: {text}: {all}"
            );
        };
        said("served ", "1 ringdisk: /dev/ublkb7 is served by process");
        said(
            "another ",
            "1 ringdisk: /dev/ublkb7 waits for a server of another disk (path=a.qcow2",
        );
        assert_eq!(lines("again "), ["/dev/ublkb7 /dev/ublkb8"; 3], "{all}");
        for key in ["deleted ", "load ", "server ", "gone ", "shared "] {
            said(key, "0");
        }
        said("before ", "/dev/ublkb7 dead");
        said("after ", "/dev/ublkb7 live");

        said("unknown ", "rate_limit_group=fast");
        for key in ["rate together ", "rate recovered "] {
            let rate: f64 = lines(key)[0].parse().unwrap_or_default();
            // What both have at once, while each alone could have it all.
            assert!((7.03..8.60).contains(&rate), "{key}{rate}: {all}");
        }
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}

/// udev itself, from this machine: its daemon, its tool, and its rule for names by what is in a disk.
fn udev() -> [PathBuf; 3] {
    let folders: Vec<PathBuf> =
        std::env::var_os("PATH").map_or(Vec::new(), |path| std::env::split_paths(&path).collect());
    let daemons = ["/usr/lib/systemd", "/lib/systemd"].map(PathBuf::from);
    let find = |name: &str| {
        let places = folders.iter().chain(&daemons).map(|folder| folder.join(name));
        let found = places.into_iter().find(|place| place.is_file());
        found.unwrap_or_else(|| panic!("{name} is needed by this test (tests/setup.sh installs udev)"))
    };
    let tool = find("udevadm");
    let rules = tool.with_file_name("../lib/udev/rules.d/60-persistent-storage.rules");
    [find("systemd-udevd"), tool, rules]
}

const UDEV: &str = r#"
mkdir -p /etc/udev/rules.d
cp /mnt/60-ringdisk.rules /mnt/60-ringdisk-users.rules /etc/udev/rules.d/
echo 'ublk:x:990:' >>/etc/group
ln -sf /mnt/ringdisk /usr/bin/ringdisk
/mnt/systemd-udevd --daemon
ls /run/udev/control >/dev/null
settled() {
    /mnt/udevadm settle --timeout=60
    for link in /dev/disk/by-id/*; do
        [ ! -L "$link" ] || echo "link $1 $(basename "$link") $(readlink "$link")"
    done
}
ringdisk image create a.qcow2 64M >/dev/null
ringdisk image create b.qcow2 64M >/dev/null
add udev add --disk path=a.qcow2,serial=DATA "path=b.qcow2,serial=x y/z" --partitions
settled all
printf '\000\000\000\000\203\000\000\000\000\010\000\000\000\200\000\000' | dd of=/dev/ublkb0 bs=1 seek=446 status=none
printf '\125\252' | dd of=/dev/ublkb0 bs=1 seek=510 conv=fsync status=none
kill -9 $server
wait $server || true
settled orphans
add udev recover --all
settled again
kill $server
wait $server
settled none
add udev add --disk path=a.qcow2,serial=DATA --partitions
tries=0
until [ -e /dev/ublkb0p1 ] || [ $tries -ge 300 ]; do tries=$((tries + 1)); sleep 0.1; done
settled partition
kill $server
wait $server
settled end

# What a guest has written into the whole disk. Rules newer than these look into ublk devices.
sed 's/|zd\*"/|zd*|ublkb*"/' /mnt/60-persistent-storage.rules >/etc/udev/rules.d/60-persistent-storage.rules
grep -q 'ublkb\*' /etc/udev/rules.d/60-persistent-storage.rules
# contents NAME ARGUMENTS…: whether there is a link by the label of the file system.
contents() {
    name=$1
    shift
    /mnt/udevadm control --reload
    add udev add --disk path=a.qcow2,serial=DATA "$@"
    mkfs.ext4 -q -F -L GUEST /dev/ublkb0
    /mnt/udevadm trigger --action=change --settle /sys/class/block/ublkb0
    settled "contents-$name"
    [ -L /dev/disk/by-label/GUEST ] && echo "contents $name read" || echo "contents $name unread"
    kill $server
    wait $server
}
contents unprotected
cp /mnt/59-ringdisk.rules /etc/udev/rules.d/
contents protected
contents allowed --partitions
# And devices to users of a group.
/mnt/udevadm trigger --action=add /sys/class/misc/ublk-control
settled group
mkdir -p /tmp/user/run
qemu-img create -q -f qcow2 /tmp/user/a.qcow2 64M
chown -R 1000:1000 /tmp/user
setpriv --reuid 1000 --regid 1000 --groups 990 env XDG_RUNTIME_DIR=/tmp/user/run \
    /mnt/ringdisk ublk add --disk path=/tmp/user/a.qcow2 >user.out 2>user.err & server=$!
tries=0
until [ -s user.out ] || ! [ -d /proc/$server ] || [ $tries -ge 300 ]; do tries=$((tries + 1)); sleep 0.1; done
settled user
stat -c '%n %u' /dev/ublkb0 /dev/ublkc0 | sed 's/^/owner /'
kill $server
wait $server && echo "user 0" || cat user.err
"#;

#[test]
fn udev_gives_names_by_our_rules_and_reads_only_what_it_may() -> Result<(), Error> {
    let [daemon, tool, rules] = udev();
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    on_each(|_, lab| {
        let scratch = Scratch::new()?;
        let outcome = run_with(lab, &scratch, UDEV, |tools| {
            tools
                .program(&daemon, "systemd-udevd")?
                .program(&tool, "udevadm")?
                .file(&rules)?
                .file(&packaging.join("59-ringdisk.rules"))?
                .file(&packaging.join("60-ringdisk.rules"))?
                .file(&packaging.join("60-ringdisk-users.rules"))
        })?;
        judge_udev(&outcome);
        Ok(())
    })
}

fn judge_udev(outcome: &Outcome) {
    let all = said(outcome);
    let lines = |key: &str| -> Vec<&str> {
        outcome
            .lines()
            .filter_map(|line| line.strip_prefix(key))
            .collect()
    };
    let both = [
        r"ringdisk-DATA ../../ublkb0",
        r"ringdisk-x\x20y\x2fz ../../ublkb1",
    ];
    for key in ["link all ", "link orphans ", "link again "] {
        assert_eq!(lines(key), both, "{key}: {all}");
    }
    let partition = "ringdisk-DATA-part1 ../../ublkb0p1";
    assert_eq!(lines("link partition "), [both[0], partition], "{all}");
    assert_eq!(lines("owner "), ["/dev/ublkb0 1000", "/dev/ublkc0 1000"], "{all}");
    assert_eq!(lines("user "), ["0"], "{all}");
    // The first shows that the rule is needed.
    assert_eq!(
        lines("contents "),
        ["unprotected read", "protected unread", "allowed read"],
        "{all}"
    );
    for key in ["unprotected", "protected", "allowed"] {
        assert_eq!(lines(&format!("link contents-{key} ")), both[..1], "{key}: {all}");
    }
    for key in ["link none ", "link end "] {
        assert_eq!(lines(key), Vec::<&str>::new(), "{key}: {all}");
    }
}

/// Who is inside the sandbox, and whether everything can be done there.
const SANDBOX: &str = r#"
# threads NAME: of how many threads of the server how many are confined, with no new privileges to be had.
threads() {
    total=0 confined=0
    for status in /proc/$server/task/*/status; do
        # The kernel's own, which run nothing of ours.
        ! grep -q '^Name:[[:space:]]*iou-' $status || continue
        total=$((total + 1))
        ! grep -q '^Seccomp:[[:space:]]*2' $status || ! grep -q '^NoNewPrivs:[[:space:]]*1' $status || confined=$((confined + 1))
    done
    echo "threads $1 $total $confined"
}
ringdisk image create a.qcow2 64M >/dev/null
ringdisk image create b.qcow2 64M >/dev/null
truncate -s 64M r.raw
for transport in $transports; do
    add box add --disk path=a.qcow2,num_queues=2,serial=BOX path=b.qcow2,queue_size=64 path=r.raw,image_type=raw --transport $transport
    threads $transport
    [ -e /dev/disk/by-id/ringdisk-BOX ]
    for dev in /dev/ublkb0 /dev/ublkb2; do
        verify $dev --numjobs=2 --offset_increment=24m --size=8m
        blkdiscard -o 1M -l 8M $dev
        blkdiscard -z -o 10M -l 3M $dev
    done
    ringdisk ublk info 0 --json | sed "s/^/info $transport /"
    ended "grown $transport" ringdisk ublk set-size 0 128M
    ended "shrunk $transport" ringdisk ublk set-size 0 64M
    kill -9 $server
    wait $server || true
    add box recover --all
    threads $transport
    verify /dev/ublkb1 --offset=32m --size=8m
    ended "deleted $transport" ringdisk ublk del 2
    # What somebody has written without waiting for the disk, and has still open: it is in the image in the end.
    head -c 4M /dev/urandom >noise
    exec 9>/dev/ublkb1
    cat noise >&9
    kill $server
    wait $server && echo "server $transport 0"
    exec 9>&-
    qemu-img convert -f qcow2 -O raw b.qcow2 b.raw
    cmp -n 4194304 noise b.raw && echo "kept $transport"
    [ -L /dev/disk/by-id/ringdisk-BOX ] || echo "unnamed $transport"
    rm b.raw a.qcow2
    check b.qcow2
    ringdisk image create a.qcow2 64M >/dev/null
    grep -E 'WARN|ERROR' box.err | grep -v 'has the removed device open still' | sed "s/^/logged $transport /" || true
done
ls /run/ringdisk/ublk | wc -l | sed 's/^/remembered /'
add free add --disk path=a.qcow2 --sandbox off
threads off
kill $server
wait $server
"#;

#[test]
fn a_server_and_all_its_threads_have_given_up_what_serving_does_not_take() -> Result<(), Error> {
    on_both(SANDBOX, |kernel, outcome| {
        let all = said(outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        for &transport in super::transports(kernel) {
            let key = format!("threads {transport} ");
            let threads = outcome.lines().filter_map(|line| line.strip_prefix(&key));
            let threads: Vec<Vec<u32>> = threads
                .map(|counts| counts.split(' ').filter_map(|count| count.parse().ok()).collect())
                .collect();
            assert_eq!(threads.len(), 2, "{all}");
            for counts in threads {
                // Workers of four queues, who accepts, who waits for signals, and the main thread.
                assert!(counts[0] >= 7 && counts[0] == counts[1], "{transport}: {all}");
            }
            super::zero_copy::assert_in_force(transport, outcome);
            let grown = value(&format!("grown {transport} "));
            assert_eq!(grown.starts_with("0 134217728"), kernel == Kernel::V7, "{all}");
            assert!(value(&format!("deleted {transport} ")).starts_with('0'), "{all}");
            let lines = [
                format!("server {transport} 0"),
                format!("kept {transport}"),
                format!("unnamed {transport}"),
            ];
            for line in lines {
                assert!(outcome.lines().any(|said| said == line), "{line}: {all}");
            }
        }
        let logged: Vec<&str> = outcome
            .lines()
            .filter(|line| line.starts_with("logged "))
            .collect();
        assert_eq!(logged, Vec::<&str>::new(), "nothing was refused: {all}");
        assert_eq!(value("remembered "), "0", "{all}");
        assert!(value("threads off ").ends_with(" 0"), "it can be seen: {all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}
