//! A disk that another process serves comes to a running machine, and goes again.

use super::{nested, take};
use lab::{Error, Scratch, image};

/// Works on the disk, lets it go when it is asked to, and finds everything again when it comes back.
const INNER: &str = r#"
far() { grep -lx FAR /sys/block/vd*/serial 2>/dev/null | cut -d/ -f4; }
wait_far() { until disk=$(far) && [ -n "$disk" ]; do sleep 0.1; done; }
echo "say ready"
wait_far
echo "found $disk of $(ls /sys/block/$disk/mq | wc -l) queues"
mkfs.ext4 -q /dev/$disk
mount /dev/$disk /mnt
fio --name=verified --directory=/mnt --size=8m --rw=randwrite --bsrange=4k-64k --ioengine=libaio --iodepth=16 --direct=1 \
    --fsync=64 --fallocate=none --verify=xxhash --verify_fatal=1 --do_verify=1 --eta=never --output=/tmp/fio || { cat /tmp/fio; exit 1; }
sha256sum /mnt/verified* >/root/sums
umount /mnt
echo "say unmounted"
while [ -n "$(far)" ]; do sleep 0.1; done
echo "say gone"
wait_far
mount /dev/$disk /mnt
sha256sum -c /root/sums
umount /mnt
"#;

#[test]
fn a_disk_that_another_process_serves_is_added_to_a_running_machine_and_removed_from_it() -> Result<(), Error>
{
    let lab = lab::require();
    let scratch = Scratch::new()?;
    let script = r#"
serve() {
    ./ringdisk vhost-user --socket far.sock --disk path=data.qcow2,num_queues=2,serial=FAR & server=$!
    tries=0
    until [ -S far.sock ]; do
        tries=$((tries + 1)); [ $tries -lt 100 ] || exit 1
        sleep 0.1
    done
}
wait_for() {
    tries=0
    until grep -q "say $1" far.log 2>/dev/null; do
        tries=$((tries + 1)); [ $tries -lt 900 ] || { told far; exit 1; }
        sleep 0.2
    done
}
ctl() { ./ringdisk ctl --socket control "$@"; }
refused() { name=$1; shift; ctl "$@" 2>&1 | sed "s/^/$name /" || true; }
./ringdisk image create other.qcow2 16M >/dev/null
data=path=other.qcow2
run far --control control & machine=$!
wait_for ready
# Nobody is there yet: it is refused, and nothing is left behind.
refused nobody disk-add --disk vhost_user=on,socket=far.sock,id=far
serve
ctl disk-add --disk vhost_user=on,socket=far.sock,id=far,num_queues=2 | sed 's/^/added /'
refused twice disk-add --disk vhost_user=on,socket=far.sock,id=far
ctl info | sed 's/^/with /'
wait_for unmounted
ctl disk-remove far | sed 's/^/removed /'
wait_for gone
ctl info | sed 's/^/without /'
# The server was let go, and serves whoever comes next.
ctl disk-add --disk vhost_user=on,socket=far.sock,id=far,num_queues=2 | sed 's/^/added /'
wait $machine && echo "ended 0" || echo "ended $?"
kill $server
wait $server && echo "served 0" || echo "served $?"
told far
"#;
    let (outcome, tools) = nested(&lab, &scratch, &[("far", INNER)], script)?;
    let all = outcome.lines().collect::<Vec<_>>().join("\n");
    let has = |wanted: &str| assert!(all.contains(wanted), "no {wanted:?}: {all}");
    for wanted in [
        "nobody ringdisk: ",
        "twice ringdisk: a disk is called `far` already",
        "inner found vdc of 2 queues",
        r#"removed {"id":"far","ok":true}"#,
        ": OK",
        "inner @@exit 0",
    ] {
        has(wanted);
    }
    let value = |key: &str| outcome.value(key).unwrap_or_else(|| panic!("no {key:?}: {all}"));
    assert!(value("with ").contains(r#""io":"vhost-user""#), "{all}");
    assert!(!value("without ").contains("far"), "{all}");
    let added = outcome.lines().filter(|line| line.starts_with("added "));
    assert_eq!(
        added.filter(|line| line.contains(r#""ok":true"#)).count(),
        2,
        "{all}"
    );
    assert_eq!((value("ended "), value("served ")), ("0", "0"), "{all}");
    image::check_flawless(&take(&scratch, &tools, "data.qcow2")?)?;
    Ok(())
}
