//! A source of entropy as a driver finds it.

use ringdisk_driver::Driver;

use super::super::VirtioPciDevice;
use super::super::tests::{Board, RING_RESET, wait_used};
use super::BYTES_MAX;
use crate::testing::{DATA, RING_FEATURES};

/// The longest chain of these tests: more than one answer has.
const LONG: u32 = 3 * BYTES_MAX as u32;

fn board() -> Board<VirtioPciDevice> {
    Board::of(|memory, machine, window| VirtioPciDevice::entropy(None, memory, machine, window))
}

fn start(board: &mut Board<VirtioPciDevice>) -> Driver {
    board.negotiate(RING_FEATURES);
    assert_eq!(
        board.get(20, 1),
        11,
        "{RING_FEATURES:#x} with {RING_RESET:#x} are offered"
    );
    board.set(16, 2, 0);
    let mut driver = board.enable(0);
    driver.event_idx = true;
    driver.write(DATA, &[0; LONG as usize]);
    board.set(20, 1, 15);
    driver
}

/// Asks for `len` bytes; returns the number that came.
fn ask(board: &mut Board<VirtioPciDevice>, driver: &mut Driver, parts: &[(u64, u32, bool)]) -> u32 {
    let head = driver.chain(parts);
    driver.make_available(head);
    board.kick(0);
    let (used, len) = wait_used(driver);
    assert_eq!(used, u32::from(head));
    len
}

#[test]
fn driver_gets_random_bytes_and_an_interrupt() {
    let mut board = board();
    assert_eq!(board.config_u32(0), 0x1044_1AF4);
    let mut driver = start(&mut board);
    driver.want_interrupt();
    let len = ask(
        &mut board,
        &mut driver,
        &[(DATA, 64, true), (DATA + 100, 28, true)],
    );
    assert_eq!(len, 92);
    assert!(board.bench.was_raised(1), "the queue's interrupt");
    let zeros = |bytes: &[u8]| bytes.iter().filter(|&&byte| byte == 0).count();
    assert!(zeros(&driver.read(DATA, 64)) < 16);
    assert_eq!(driver.read(DATA + 64, 36), [0; 36], "nothing between the parts");
    assert!(zeros(&driver.read(DATA + 100, 28)) < 8);
    let before = driver.read(DATA, 64);
    assert_eq!(ask(&mut board, &mut driver, &[(DATA, 64, true)]), 64);
    assert_ne!(driver.read(DATA, 64), before);
}

#[test]
fn odd_chains_get_what_they_have_room_for() {
    let mut board = board();
    let mut driver = start(&mut board);
    assert_eq!(
        ask(&mut board, &mut driver, &[(DATA, 16, false)]),
        0,
        "only to be read"
    );
    assert_eq!(
        ask(&mut board, &mut driver, &[(DATA, 16, false), (DATA, 1, true)]),
        1
    );
    assert_eq!(
        ask(&mut board, &mut driver, &[(DATA, LONG, true)]),
        BYTES_MAX as u32
    );
    assert_eq!(driver.read(DATA + BYTES_MAX as u64, 64), [0; 64]);
    // A chain to outside memory breaks the queue, and no more.
    let head = driver.chain(&[(0xFFFF_0000, 16, true)]);
    driver.make_available(head);
    board.kick(0);
    assert!(board.bench.was_raised(0), "the configuration's interrupt");
    assert_eq!(board.get(20, 1), 15 | 64, "it needs a reset");
    board.set(20, 1, 0);
    let mut driver = start(&mut board);
    assert_eq!(ask(&mut board, &mut driver, &[(DATA, 8, true)]), 8);
}

#[test]
fn paused_source_gives_nothing_and_goes_on_where_it_was() {
    let mut board = board();
    let mut driver = start(&mut board);
    assert_eq!(ask(&mut board, &mut driver, &[(DATA, 8, true)]), 8);
    board.function.pause().expect("a pause");
    let head = driver.chain(&[(DATA, 32, true)]);
    driver.make_available(head);
    board.kick(0);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(driver.take_used(), None);
    board.function.resume();
    assert_eq!(wait_used(&mut driver), (u32::from(head), 32));
    board.function.unplug().expect("an end");
}
