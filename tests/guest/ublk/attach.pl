# Adds a device to a running server and removes it again, ROUNDS times, as a program does that keeps its connection:
#   perl attach.pl SOCKET IMAGE ROUNDS
# Prints, for each round, the microseconds from the request to the end of a read that the device's server has answered.
use strict;
use warnings;
use IO::Socket::UNIX;

my ($path, $image, $rounds) = @ARGV;
my $control = IO::Socket::UNIX->new(Peer => $path) or die "$path: $!";
$control->autoflush(1);

sub asked {
    my ($request) = @_;
    print $control "$request\n";
    my $answer = <$control> // die "no answer";
    $answer =~ /"ok":\s*true/ or die "$request: $answer";
    return $answer;
}

# clock_gettime(CLOCK_MONOTONIC), in microseconds.
sub now {
    my $time = pack 'q2', 0, 0;
    syscall(228, 1, $time) == 0 or die "clock_gettime: $!";
    my ($seconds, $ns) = unpack 'q2', $time;
    return $seconds * 1000000 + int($ns / 1000);
}

for (1 .. $rounds) {
    my $began = now();
    my ($device) = asked(qq({"command": "disk-add", "disk": {"path": "$image"}})) =~ m{(/dev/ublkb(\d+))} or die 'no device';
    open my $disk, '<:raw', $device or die "$device: $!";
    # The kernel has read the first blocks, to look for partitions.
    sysseek $disk, 32 << 20, 0 or die "$device: $!";
    sysread($disk, my $block, 4096) == 4096 or die "$device: $!";
    my $took = now() - $began;
    close $disk;
    my ($id) = $device =~ /(\d+)$/;
    asked(qq({"command": "disk-remove", "id": "$id"}));
    print "$took ";
}
print "\n";
