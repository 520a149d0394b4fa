//! What an operator has around devices: names that stay, a command line that goes on where a killed server was, and
//! limits that devices share.

use super::{on_both, run_with, said};
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
    --direct=1 --fsync=32 --fallocate=none --verify=crc32c --verify_fatal=1 --do_verify=1 --time_based --runtime=10 \
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
    on_both(OPERATIONS, |_, outcome| {
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

/// udev itself, from this machine.
fn udev() -> Option<(PathBuf, PathBuf)> {
    let folders: Vec<PathBuf> =
        std::env::var_os("PATH").map_or(Vec::new(), |path| std::env::split_paths(&path).collect());
    let daemons = ["/usr/lib/systemd", "/lib/systemd"].map(PathBuf::from);
    let find = |name: &str| {
        let places = folders.iter().chain(&daemons).map(|folder| folder.join(name));
        places.into_iter().find(|place| place.is_file())
    };
    Some((find("systemd-udevd")?, find("udevadm")?))
}

const UDEV: &str = r#"
mkdir -p /etc/udev/rules.d
cp /mnt/60-ringdisk.rules /etc/udev/rules.d/
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
"#;

#[test]
#[expect(
    clippy::print_stdout,
    reason = "what cannot run here is counted by what it prints"
)]
fn udev_gives_names_by_our_rule() -> Result<(), Error> {
    let Some((daemon, tool)) = udev() else {
        println!("cannot run here: names by udev's rule, because udev is not installed");
        return Ok(());
    };
    let rule = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/60-ringdisk.rules");
    for kernel in [Kernel::V6_12, Kernel::V7] {
        let Some(lab) = lab::require_kernel(kernel) else {
            continue;
        };
        let scratch = Scratch::new()?;
        let outcome = run_with(&lab, &scratch, UDEV, |tools| {
            tools
                .program(&daemon, "systemd-udevd")?
                .program(&tool, "udevadm")?
                .file(&rule)
        })?;
        judge_udev(&outcome);
    }
    Ok(())
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
    for key in ["link none ", "link end "] {
        assert_eq!(lines(key), Vec::<&str>::new(), "{key}: {all}");
    }
}
