//! Many disks in one process, on workers that all of them share: a hundred, or as many as `RINGDISK_DISKS` says.
#![expect(clippy::print_stdout, reason = "a number that was measured is worth a line")]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use ringdisk_gen::Random;

use crate::client::{Ask, BLOCK, Client};
use crate::memory::private_kib;
use crate::server::{Server, World};

const BLOCKS: usize = 256;
const WORKERS: [&str; 2] = ["--workers", "2"];
/// The bounds of `docs/howto-density.md` are three seconds and 100 ms, and `make bench` measures. This machine does other things.
const SLOW: Duration = Duration::from_secs(30);
/// However many disks there are: they move one at a time.
const INTERRUPTION_MAX: Duration = Duration::from_secs(1);

fn count() -> usize {
    let asked = std::env::var("RINGDISK_DISKS").ok();
    asked.and_then(|count| count.parse().ok()).unwrap_or(100)
}

/// Starts a server of all disks.
fn serve(world: &World, count: usize, more: &[&str]) -> Server {
    let sockets: Vec<String> = (0..count).map(|disk| format!("{disk}.sock")).collect();
    let disks: Vec<String> = (0..count)
        .map(|disk| format!("path={disk}.qcow2,id=disk{disk}"))
        .collect();
    world.serve_all(&sockets, &disks, &[&WORKERS, more].concat())
}

/// The names of a server's threads.
fn names(server: &Server) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).expect("its threads");
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.flatten().filter_map(name).collect()
}

/// The CPU time of a process, in ticks of 10 ms.
fn ticks(server: &Server) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.pid())).expect("its times");
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let times = after_name.split_whitespace().skip(11).take(2);
    times.filter_map(|time| time.parse::<u64>().ok()).sum()
}

/// The CPU time of a thread, in nanoseconds: `/proc/[pid]/task/[tid]`, or the like.
fn ran_ns(thread: &Path) -> Option<u64> {
    let stat = std::fs::read_to_string(thread.join("schedstat")).ok()?;
    stat.split_whitespace().next()?.parse().ok()
}

/// The CPU time of a server's threads, in nanoseconds.
fn cpu_ns(server: &Server) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).expect("its threads");
    tasks.flatten().filter_map(|task| ran_ns(&task.path())).sum()
}

/// The reads that are measured, and those of one disk in a row.
const READS: u64 = 80_000;
const BURST: usize = 8;

/// The CPU time that a server takes for a read, in nanoseconds, with requests of all these clients in flight at a time. Their disks have
/// so many blocks.
fn cost(server: &Server, clients: &mut [Client], blocks: usize, random: &mut Random) -> u64 {
    let (before, mut reads) = (cpu_ns(server), 0);
    while reads < READS {
        for client in clients.iter_mut() {
            for _ in 0..BURST {
                reads += u64::from(client.submit(Ask::Read, random.below(blocks as u64) as usize));
            }
        }
        clients.iter_mut().for_each(Client::drain);
    }
    (cpu_ns(server) - before) / reads
}

/// The CPU time that such a read takes of a thread that reads these files with no server between: what cold memory costs anybody.
fn cost_without_server(files: &[File], random: &mut Random) -> u64 {
    let own = || ran_ns(Path::new("/proc/thread-self")).expect("its time");
    let mut buffers = vec![1; files.len() * BURST * BLOCK];
    let blocks = files
        .iter()
        .map(|file| file.metadata().expect("a file").len() / BLOCK as u64);
    let blocks: Vec<u64> = blocks.collect();
    let (before, mut reads) = (own(), 0);
    while reads < READS {
        for ((file, blocks), buffer) in files
            .iter()
            .zip(&blocks)
            .zip(buffers.chunks_exact_mut(BURST * BLOCK))
        {
            for block in buffer.chunks_exact_mut(BLOCK) {
                let at = BLOCK as u64 * random.below(*blocks);
                file.read_exact_at(block, at).expect("a block of an image");
                reads += 1;
            }
        }
    }
    (own() - before) / reads
}

/// The cost of a read of one disk that is as large as `count` of the others together: what cold memory costs, with one disk.
fn cost_of_one_as_large(world: &World, count: usize, random: &mut Random) -> u64 {
    let blocks = count * BLOCKS;
    let bytes = (blocks * BLOCK).to_string();
    world.qemu_img(&["create", "-q", "-f", "qcow2", "large.qcow2", &bytes]);
    let server = world.serve_at("large.sock", "path=large.qcow2", &WORKERS);
    let mut clients = [Client::new(blocks, false)];
    let [client] = &mut clients;
    client.connect(&world.path("large.sock"));
    for block in 0..blocks {
        while !client.submit(Ask::Write(block as u64), block) {
            client.drain();
        }
    }
    client.drain();
    let mut reads = |blocks| cost(&server, &mut clients, blocks, random);
    // The first reads load what the others have loaded.
    reads(blocks);
    let cost = reads(blocks);
    assert_eq!(server.stop(), Some(0), "{}", world.log());
    cost
}

/// Each client works for a moment; the longest time that one of them had no answer while it worked.
fn work_all(clients: &mut [Client], random: &mut Random) -> Duration {
    let mut longest = Duration::ZERO;
    for client in clients {
        let began = Instant::now();
        client.work(random, Duration::from_millis(2));
        client.drain();
        longest = longest.max(began.elapsed());
    }
    longest
}

#[test]
fn many_disks_are_served_grown_handed_over_and_closed() {
    let count = count();
    let world = World::new("cluster_size=65536", BLOCKS * BLOCK);
    for disk in 0..count {
        let image = world.path(&format!("{disk}.qcow2"));
        std::fs::copy(world.path("disk.qcow2"), image).expect("a copy");
    }
    let mut random = Random::new(0xde_5177);
    let began = Instant::now();
    let mut old = serve(&world, count, &["--control", "control"]);
    let mut clients: Vec<Client> = (0..count).map(|_| Client::new(BLOCKS, false)).collect();
    for (disk, client) in clients.iter_mut().enumerate() {
        client.connect(&world.path(&format!("{disk}.sock")));
    }
    let started = began.elapsed();
    assert!(started < SLOW, "{started:?}: {}", world.log());
    work_all(&mut clients, &mut random);

    // Without anything to do they cost nothing but memory.
    // The server's own, whatever the machine has, are six beside the workers.
    let most = 4 * std::thread::available_parallelism().map_or(2, usize::from).max(2);
    let deadline = Instant::now() + SLOW;
    while names(&old).len() > most {
        let found = names(&old).len();
        assert!(
            Instant::now() < deadline,
            "{found} threads; at most {most} wanted"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let before = ticks(&old);
    std::thread::sleep(Duration::from_secs(1));
    let idle = ticks(&old) - before;
    let each = private_kib(&old) / count as u64;
    println!(
        "{count} disks: connected in {started:?}, {} threads, {each} KiB each, {idle} ticks in a second",
        names(&old).len()
    );
    assert!(idle <= 1, "{idle} ticks of CPU time in an idle second");
    assert!(each <= 1024, "{each} KiB for each disk");

    // What the images have is in the page cache then.
    for block in 0..BLOCKS {
        for client in &mut clients {
            while !client.submit(Ask::Read, block) {
                client.drain();
            }
        }
    }
    clients.iter_mut().for_each(Client::drain);
    // In turns, as the machine's speed changes meanwhile.
    let turns = if count < 1000 { 1 } else { 15 };
    let mut costs: Vec<[u64; 2]> = (0..turns)
        .map(|_| [1, count].map(|busy| cost(&old, &mut clients[..busy], BLOCKS, &mut random)))
        .collect();
    costs.sort_unstable_by(|[alone, among], [other_alone, other_among]| {
        (among * other_alone).cmp(&(other_among * alone))
    });
    let [alone, among] = costs[turns / 2];
    let ratios = costs
        .iter()
        .map(|[alone, among]| format!("{:.2}", *among as f64 / *alone as f64));
    let ratios = ratios.collect::<Vec<String>>().join(", ");
    let image = |disk: usize| File::open(world.path(&format!("{disk}.qcow2"))).expect("an image");
    let images: Vec<File> = (0..count).map(image).collect();
    let without = [&images[..1], &images].map(|images| cost_without_server(images, &mut random));
    let large = cost_of_one_as_large(&world, count, &mut random);
    println!(
        "CPU time for a read: {alone} ns alone, {among} ns with all disks busy (ratios of all turns: {ratios}), {large} ns \
         alone of one as large as all; by `pread`, without a server, {} and {} ns",
        without[0], without[1]
    );
    // A machine that does other things too doubles either.
    assert!(among < 4 * alone, "{among} ns, and {alone} ns alone");

    // One grows; it is told of none of the others.
    let larger = (2 * BLOCKS * BLOCK).to_string();
    let (done, said) = world.ctl("control", &["disk-resize", "disk7", &larger]);
    assert!(done, "{said}");
    let (_, said) = world.ctl("control", &["disk-list"]);
    assert_eq!(said.matches(&format!("\"size\":{larger}")).count(), 1, "{said}");

    // Handed over while some of them work.
    let mut longest = Duration::ZERO;
    for round in 0..2 {
        let new = serve(&world, count, &["--takeover", "--control", "control"]);
        let deadline = Instant::now() + SLOW;
        let busy = count.min(8);
        while old.is_running() {
            assert!(
                Instant::now() < deadline,
                "the takeover does not end: {}",
                world.log()
            );
            longest = longest.max(work_all(&mut clients[..busy], &mut random));
        }
        assert_eq!(old.wait(), Some(0), "round {round}: {}", world.log());
        old = new;
        longest = longest.max(work_all(&mut clients, &mut random));
    }
    println!("the longest interruption by a takeover of {count} disks: {longest:?}");
    assert!(longest < INTERRUPTION_MAX, "{longest:?}");
    assert!(clients.iter().all(Client::is_connected), "{}", world.log());

    let began = Instant::now();
    assert_eq!(old.stop(), Some(0), "{}", world.log());
    let stopped = began.elapsed();
    println!("stopped in {stopped:?}");
    assert!(stopped < SLOW, "{stopped:?}");
    for disk in (0..count).step_by(count / 10) {
        let image = format!("{disk}.qcow2");
        world.assert_image_sound(&image, false);
        let mut contents = world.contents_of(&image);
        contents.truncate(BLOCKS * BLOCK);
        clients[disk].assert_contents(&contents);
    }
}
