# Three servers with three devices each. The images of the second and the third one are on a file system that can be frozen: what is
# written to them is under way then, in the kernel, until it thaws.
modprobe loop
truncate -s 640M /tmp/slow.ext4
mkfs.ext4 -q /tmp/slow.ext4
mkdir -p /run/slow
mount -o loop /tmp/slow.ext4 /run/slow
disk() { case $1 in [345678]) echo path=/run/slow/i$1.qcow2 ;; *) echo path=i$1.qcow2 ;; esac; }
image() { disk $1 | sed 's/path=//'; }
for id in 0 1 2 3 4 5 6 7 8; do ringdisk image create -o cluster_size=16k $(image $id) 48M >/dev/null; done
pid_of() { ringdisk ublk info $1 --json | sed 's/.*"pid":\([0-9]*\).*/\1/'; }
# served NAME PID: how many devices this process serves.
served() { echo "served $1 $(ringdisk ublk list | grep -c " live .*, server $2," || true)"; }
state_of() { ringdisk ublk list | awk -v dev=/dev/ublkb$1 '$1 == dev { print $2 }'; }
# up NAME PID: this server says that its devices are there.
up() {
    soon 60 spoken $1 $2 || true
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
fio --name=global --ioengine=libaio --iodepth=8 --direct=1 --rw=randwrite --bsrange=4k-32k --size=8m --rate_iops=20 \
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
soon 60 [ -e held ]
old=$server
/mnt/ringdisk --log info ublk upgrade --all >dead.out 2>dead.err & dead=$!
wait $old && echo "orphaned by $old"
kill -9 $dead
wait $dead || true
all_wait() { [ "$(ringdisk ublk list | grep -c ' quiesced ')" = 9 ]; }
soon 60 all_wait
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
