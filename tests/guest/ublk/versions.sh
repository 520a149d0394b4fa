# The versions of servers and of their successors, and what a service manager hears.
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
perl other.pl /tmp/other '{"ok":true,"devices":[],"hand_over":3}' & other=$!
perl other.pl /tmp/older '{"ok":true,"devices":[]}' & older=$!
soon 60 [ -S /tmp/other ]
soon 60 [ -S /tmp/older ]
for kind in other older; do
    sed -i.kept "s|$control|/tmp/$kind|" /run/ringdisk/ublk/0.json
    ended $kind ringdisk ublk upgrade --all
    mv /run/ringdisk/ublk/0.json.kept /run/ringdisk/ublk/0.json
done
kill $other $older
perl ask.pl $control '{"command":"hand-over","version":1,"disks":["/dev/ublkb0"],"seconds":20}' | sed 's/^/version /'
perl ask.pl $control '{"command":"hand-over","version":2,"disks":["/dev/ublkb0"],"seconds":20,"partly":true}' | sed 's/^/part /'
served on $server

# What a service manager hears when it has the server replaced: of a successor that is refused, and of one that is not.
cat >hear.pl <<'END'
use IO::Socket::UNIX;
my $manager = IO::Socket::UNIX->new(Local => $ARGV[0], Type => SOCK_DGRAM) or die $!;
$| = 1;
while (defined $manager->recv(my $said, 1000)) { print "$said\n" }
END
perl hear.pl /tmp/notify >heard & hear=$!
perl other.pl /tmp/busy '{"ok":true,"devices":[],"hand_over":2}' '{"ok":false,"error":"not now"}' & busy=$!
soon 60 [ -S /tmp/notify ]
soon 60 [ -S /tmp/busy ]
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
soon 60 heard
sed "s/=$old\$/=OLD/; s/=$server\$/=NEW/; s/=[0-9][0-9]*\$/=OTHER/; s/READY=.*/READY/" heard | tr '\n' ' ' | sed 's/^/heard /'
echo
sed -n 's/^PPid:[^0-9]*/parent /p' /proc/$server/status
served reloaded $server
ended nobody ringdisk ublk upgrade --server $old
kill $hear $busy
loaded
# The last one is the shell's own again.
add last upgrade --server $server
