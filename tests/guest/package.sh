# The Debian package in a guest that has nothing of ours: installed, used with systemd, upgraded under running servers, removed.
# systemd is the first process of a PID namespace; the guest's own is the lab's.
mount -o ro /dev/lab/tools /mnt
export DEBIAN_FRONTEND=noninteractive
quietly dpkg --install /mnt/lib*.deb /mnt/systemd_*.deb
quietly dpkg --install /mnt/ringdisk_*.deb
ringdisk --version | sed 's/^/version /'
ls /usr/share/man/man1/ringdisk*.1.gz | wc -l | sed 's/^/pages /'
zcat /usr/share/man/man1/ringdisk-vhost-user.1.gz | grep -c 'socket..group' | sed 's/^/manual /'
bash -c '. /usr/share/bash-completion/completions/ringdisk; COMP_WORDS=(ringdisk vho); COMP_CWORD=1; _ringdisk ringdisk vho x; echo "completed $COMPREPLY"'

ln -sf /lib/systemd/system/basic.target /etc/systemd/system/default.target
mkdir -p /sys/fs/cgroup
cat >/tmp/boot <<'END'
mount -t proc none /proc
mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup
export container=lab
exec /lib/systemd/systemd --system --log-target=console --log-level=warning
END
unshare --pid --mount --fork --kill-child sh /tmp/boot >/tmp/systemd.log 2>&1 & namespace=$!
forked() { first=$(tr -d ' ' </proc/$namespace/task/$namespace/children) && [ -n "$first" ]; }
soon 20 forked
inside() { nsenter --target "$first" --mount --pid "$@"; }
booted() { inside systemctl is-active --quiet basic.target 2>/dev/null; }
soon 120 booted || { cat /tmp/systemd.log; exit 1; }

main() { inside systemctl show --property MainPID --value "$1"; }
active() { [ "$(main "$1")" != "$2" ] && inside systemctl is-active --quiet "$1"; }
mkdir -p /srv
ringdisk image create /srv/a.qcow2 64M >/dev/null
ringdisk image create /srv/b.qcow2 64M >/dev/null
echo 'OPTIONS=--restartable --socket-mode 660 --disk path=/srv/a.qcow2' >/etc/ringdisk/vhost-user/vm.conf
ringdisk image create /srv/e.qcow2 64M >/dev/null
cat >/etc/ringdisk/ublk/data.conf <<'END'
OPTIONS=--id 3 --disk path=/srv/b.qcow2
SERVING=--control /run/ringdisk/data.control --images /srv
END
ringdisk image create /srv/f.qcow2 64M >/dev/null
cat >/etc/ringdisk/devices/lab.toml <<'END'
control = "/run/ringdisk/lab.control"

[[device]]
path = "/srv/f.qcow2"
number = 7
END
modprobe ublk_drv
for unit in ringdisk-vhost-user@vm ringdisk-ublk@data ringdisk-devices@lab; do
    ended "started $unit" inside systemctl start $unit
    before=$(main $unit)
    inside sh -c "kill -9 $before"
    soon 60 active $unit "$before" && echo "restarted $unit"
    before=$(main $unit)
    ended "reloaded $unit" inside systemctl reload $unit
    soon 60 active $unit "$before" && echo "handed over $unit"
done
inside stat -c 'socket %a' /run/ringdisk/vm.sock
ended "controlled" inside ringdisk ctl --socket /run/ringdisk/vm.control info --json
dd if=/dev/urandom of=/dev/ublkb3 bs=1M count=8 oflag=direct conv=fsync status=none && echo "written 0"

# The server that a reload has started takes devices, and the one after a kill has them.
ended "added" inside ringdisk ctl --socket /run/ringdisk/data.control disk-add --disk path=/srv/e.qcow2
before=$(main ringdisk-ublk@data)
inside sh -c "kill -9 $before"
soon 60 active ringdisk-ublk@data "$before"
ended "both" inside ringdisk ctl --socket /run/ringdisk/data.control disk-list

# A server of a file, which changes.
two_disks() { printf '[[disk]]\nsocket = "/srv/%s.sock"\npath = "/srv/%s.qcow2"\n' c c d d; }
for image in c d; do ringdisk image create /srv/$image.qcow2 64M >/dev/null; done
{ echo 'images = "/srv"'; two_disks | head -n 3; } >/etc/ringdisk/serve/vms.toml
ended "started ringdisk-serve@vms" inside systemctl start ringdisk-serve@vms
two_disks | tail -n 3 >>/etc/ringdisk/serve/vms.toml
ended "reloaded ringdisk-serve@vms" inside systemctl reload ringdisk-serve@vms
soon 20 test -S /srv/d.sock && echo "followed"
echo 'readonly = 7' >>/etc/ringdisk/serve/vms.toml
inside systemctl reload ringdisk-serve@vms || echo "refused"
ended "stopped ringdisk-serve@vms" inside systemctl stop ringdisk-serve@vms
[ ! -e /srv/c.sock ] && [ ! -e /srv/d.sock ] && echo "gone"

# Devices of a file, which another server has after a reload.
ringdisk image create /srv/g.qcow2 64M >/dev/null
printf '[[device]]\npath = "/srv/g.qcow2"\nnumber = 8\n' >>/etc/ringdisk/devices/lab.toml
ended "grown devices" inside systemctl reload ringdisk-devices@lab
ended "devices" inside ringdisk ctl --socket /run/ringdisk/lab.control disk-list
echo 'max_io = "5K"' >>/etc/ringdisk/devices/lab.toml
inside systemctl reload ringdisk-devices@lab || echo "refused devices"
sed -i '$d' /etc/ringdisk/devices/lab.toml

# An upgrade leaves servers alone, and a reload hands over to the new version.
all_running() { for unit in ringdisk-vhost-user@vm ringdisk-ublk@data ringdisk-devices@lab; do main $unit; done | tr '\n' ' '; }
running=$(all_running)
quietly inside dpkg --install /mnt/ringdisk_*.deb
[ "$running" = "$(all_running)" ] && echo "upgraded under running servers"
for unit in ringdisk-vhost-user@vm ringdisk-ublk@data ringdisk-devices@lab; do
    before=$(main $unit)
    ended "reloaded again $unit" inside systemctl reload $unit
    soon 60 active $unit "$before" && echo "handed over again $unit"
done
for unit in ringdisk-vhost-user@vm ringdisk-ublk@data ringdisk-devices@lab; do
    ended "stopped $unit" inside systemctl stop $unit
    echo "state $unit $(inside systemctl show --property ActiveState,Result --value $unit | tr '\n' ' ')"
done
for image in a b c d e f g; do qemu-img check -q /srv/$image.qcow2 && echo "flawless $image"; done

quietly dpkg --purge ringdisk
find / -xdev -path /srv -prune -o -path /tmp -prune -o -name '*ringdisk*' -print | grep -v '^/run/lab\|/var/log' | sed 's/^/left /'
# All of it, so that the root is free.
kill -9 $first
wait $namespace || true
