//! Devices of users without rights, where the machine lets them: one who asks for a device owns it, and nobody else's.

use super::{on_both, said};
use lab::Error;

const USERS: &str = r#"
mkdir -p /tmp/user/run
qemu-img create -q -f qcow2 /tmp/user/a.qcow2 64M
chown -R 1000:1000 /tmp/user
# as USER COMMAND…
as() {
    user=$1
    shift
    setpriv --reuid "$user" --regid "$user" --clear-groups env XDG_RUNTIME_DIR=/tmp/user/run "$@"
}
mine="ublk add --disk path=/tmp/user/a.qcow2,num_queues=2,serial=USER"
ended closed as 1000 /mnt/ringdisk $mine
# What udev does by our rules for users.
chmod 666 /dev/ublk-control
give() {
    while :; do
        for node in /dev/ublk[bc]*; do
            RINGDISK_OWNER=
            eval "$(ringdisk ublk udev --owner "${node#/dev/}" 2>/dev/null)"
            [ -z "$RINGDISK_OWNER" ] || chown "$RINGDISK_OWNER:$RINGDISK_GROUP" "$node" 2>/dev/null || true
        done
        sleep 0.1
    done
}
give & giver=$!
ringdisk image create root.qcow2 64M >/dev/null
add root add --disk path=root.qcow2 --id 0
root=$server
ended transport as 1000 /mnt/ringdisk $mine --transport user-copy
rm -f user.out
as 1000 /mnt/ringdisk --log info $mine --json >user.out 2>user.err & server=$!
tries=0
until [ -s user.out ]; do
    tries=$((tries + 1))
    [ $tries -lt 300 ] && [ -d /proc/$server ] || { echo "no device:"; cat user.err; exit 1; }
    sleep 0.1
done
sed 's/^/made /' user.out
tries=0
until [ "$(stat -c %u /dev/ublkb1)" = 1000 ]; do tries=$((tries + 1)); [ $tries -lt 100 ] || exit 1; sleep 0.1; done
stat -c '%u' /dev/ublkb0 /dev/ublkc0 /dev/ublkb1 /dev/ublkc1 | tr '\n' ' ' | sed 's/^/owners /'
echo
as 1000 fio --name=verified --filename=/dev/ublkb1 --ioengine=libaio --iodepth=16 --direct=1 --bsrange=4k-256k --rw=randwrite \
    --size=24m --verify=xxhash --verify_fatal=1 --do_verify=1 --eta=never --output=/tmp/user/fio >&2 ||
    { cat /tmp/user/fio; exit 1; }
echo "verified 0"
as 1000 /mnt/ringdisk ublk list | sed 's/^/theirs /'
ringdisk ublk list | sed 's/^/all /'
as 1000 /mnt/ringdisk ublk info 1 --json | sed 's/^/info /'
ended foreign as 1001 /mnt/ringdisk ublk del 1
ended roots as 1000 /mnt/ringdisk ublk del 0
head -c 4M /dev/urandom >/tmp/user/noise
as 1000 dd if=/tmp/user/noise of=/dev/ublkb1 bs=1M conv=fsync status=none
ended deleted as 1000 /mnt/ringdisk ublk del 1
wait $server && echo "server 0" || { cat user.err; exit 1; }
qemu-img convert -f qcow2 -O raw /tmp/user/a.qcow2 a.raw
cmp -n 4194304 a.raw /tmp/user/noise && echo "same 0"
check /tmp/user/a.qcow2
# Nobody gives it to them.
kill $giver
wait $giver || true
ended ungiven as 1000 /mnt/ringdisk $mine
ended swept ringdisk ublk del --all
wait $root
ringdisk ublk list | wc -l | sed 's/^/left /'
"#;

#[test]
fn a_user_without_rights_has_a_device_of_their_own_if_the_machine_allows_it() -> Result<(), Error> {
    on_both(USERS, |_, outcome| {
        let all = said(outcome);
        let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
        for (key, text) in [
            ("closed ", "1 ringdisk: no permission to open /dev/ublk-control"),
            (
                "transport ",
                "users without rights have devices with copies only, not user-copy",
            ),
            ("made ", r#""transport":"copy""#),
            ("owners ", "0 0 1000 1000"),
            ("theirs ", "/dev/ublkb1 live 67108864 bytes, 2 queues of 128"),
            ("info ", "UNPRIVILEGED_DEV"),
            ("info ", r#""recovery":"off""#),
            ("foreign ", "1 ringdisk: "),
            ("roots ", "1 ringdisk: "),
            ("deleted ", "0 "),
            ("ungiven ", "1 ringdisk: "),
            (
                "ungiven ",
                "cannot open /dev/ublkc1 (udev has to give it to its owner",
            ),
            ("swept ", "0 "),
            ("left ", "0"),
        ] {
            assert!(value(key).contains(text), "{key}: {text}: {all}");
        }
        for line in ["verified 0", "server 0", "same 0", "flawless /tmp/user/a.qcow2"] {
            assert!(outcome.lines().any(|said| said == line), "{line}: {all}");
        }
        let count = |key: &str| outcome.lines().filter(|line| line.starts_with(key)).count();
        assert_eq!((count("theirs "), count("all ")), (1, 2), "{all}");
        assert_eq!(outcome.complaints(), Vec::<&str>::new(), "{}", outcome.console());
    })
}
