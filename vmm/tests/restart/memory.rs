//! The memory of a server, before a client has come and after reads all over a disk of one tebibyte.

use std::time::{Duration, Instant};

use crate::client::{BLOCK, Client};
use crate::server::{Server, World};

/// The disk: its tables are four times the cache.
const DISK_BYTES: usize = 1 << 40;
/// The table cache in KiB, as `--disk` has it below.
const CACHE_KIB: u64 = 32 << 10;
/// The guest bytes that a cached slice of a table maps.
const SLICE_SPAN: usize = 512 << 16;

/// The memory of a server that is of no file, in KiB: what it has allocated and written to. The program's pages are left out, also those
/// that the loader has relocated, because a build for tests has more of them.
pub(crate) fn private_kib(server: &Server) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", server.pid())).expect("its memory");
    let mut is_files = false;
    let mut sum = 0;
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Anonymous:") if !is_files => {
                let number = words.next().and_then(|number| number.parse::<u64>().ok());
                sum += number.unwrap_or_else(|| panic!("{line}"));
            }
            // A mapping: its addresses, rights, offset, device, inode, and perhaps a path.
            Some(first) if !first.ends_with(':') => {
                is_files = words.nth(4).is_some_and(|path| path.starts_with('/'))
            }
            _ => {}
        }
    }
    sum
}

/// The server keeps its table cache within `l2_cache=`, and what guards the writes with it.
#[test]
fn server_memory_stays_within_its_bounds() {
    stays_within(CACHE_KIB, &[]);
}

/// Whatever each image may have.
#[test]
fn tables_of_all_images_stay_within_their_bound() {
    stays_within(8 << 10, &["--table-cache", "8M"]);
}

#[expect(clippy::print_stdout, reason = "what cannot run here is said and counted")]
fn stays_within(cache_kib: u64, arguments: &[&str]) {
    if std::env::var_os("ASAN_OPTIONS").is_some() {
        println!("cannot run here: the memory of a server, because AddressSanitizer adds its own");
        return;
    }
    let world = World::new("cluster_size=65536,preallocation=metadata", DISK_BYTES);
    let disk = "path=disk.qcow2,l2_cache=32M,poll_us=0";
    let server = world.serve_disk(&["env", "--default-signal"], disk, arguments);
    let mut client = Client::new(DISK_BYTES / BLOCK, false);
    client.connect(&world.path("socket"));
    client.submit(crate::client::Ask::Read, 0);
    client.drain();
    let idle = private_kib(&server);

    // Each slice twice, in an order that the cache is no help for.
    let slices = DISK_BYTES / SLICE_SPAN;
    let deadline = Instant::now() + Duration::from_secs(120);
    for read in 0..2 * slices {
        let slice = read * 7919 % slices;
        while !client.submit(crate::client::Ask::Read, slice * (SLICE_SPAN / BLOCK)) {
            assert!(Instant::now() < deadline, "the reads take too long");
            if client.take_answers() == 0 {
                std::thread::yield_now();
            }
        }
    }
    client.drain();
    let after = private_kib(&server);
    println!("private memory: {idle} KiB idle, {after} KiB after reads");
    assert!(idle <= 1792, "{idle} KiB idle");
    assert!(
        after >= cache_kib * 7 / 8,
        "{after} KiB: the reads did not fill the cache"
    );
    assert!(
        after <= cache_kib + (6 << 10),
        "{after} KiB beside a table cache of {cache_kib}"
    );
    assert_eq!(server.stop(), Some(0));
}
