//! The behaviour that a guest sees of a virtio-blk device, whatever transport is between them: one suite for all.
//!
//! ```text
//!              ┌ device    features, configuration space, resets
//!  suite! ─────┼ requests  each type, its status and used length
//!              └ queues    kicks, interrupts, chains that break a queue
//!                   │
//!               Transport ◀── a function in this process, one of another backend, a vhost-user server
//! ```
//!
//! Each transport's tests implement [`Transport`] and have [`suite!`] make a test of every case. What is a transport's own
//! (registers, messages, reconnects) stays with its own tests. ublk has no virtqueues and no features to agree about.

use std::sync::Arc;
use std::time::{Duration, Instant};

use block::Disk;
use block::ring::RingKind;
use ringdisk_driver::blk::{self, F_CONFIG_WCE, F_DISCARD, F_FLUSH, F_MQ, F_WRITE_ZEROES};
use ringdisk_driver::{Driver, Part};

use crate::testing::{DATA, MemDisk, RING_FEATURES};

pub(crate) mod device;
pub(crate) mod queues;
pub(crate) mod requests;

/// The number of entries that devices offer and drivers use.
pub(crate) const QUEUE_SIZE: u16 = 64;
/// The serial number of devices.
pub(crate) const SERIAL: &str = "serial-1";
/// The features that drivers accept unless a case says otherwise.
pub(crate) const ALL: u64 = RING_FEATURES | F_FLUSH | F_CONFIG_WCE | F_DISCARD | F_WRITE_ZEROES;

/// The longest wait for what must come.
const PATIENCE: Duration = Duration::from_secs(20);
/// The time for which nothing must come, where nothing may.
const SILENCE: Duration = Duration::from_millis(30);

/// A device for a disk, and the way to it.
pub(crate) trait Transport: Sized {
    /// A device with `queues` queues of [`QUEUE_SIZE`] entries. No driver has touched it.
    fn new(disk: Arc<dyn Disk>, queues: u16, ring: RingKind) -> Self;

    /// The features that the device offers, without the transport's own.
    fn offered(&mut self) -> u64;

    /// Accepts `features` and starts every queue in empty rings. Returns false if the device refuses the features.
    fn start(&mut self, features: u64) -> bool;

    /// The driver of a queue that was started.
    fn driver(&mut self, queue: usize) -> &mut Driver;

    /// Kicks a queue.
    fn kick(&mut self, queue: usize);

    /// Returns true, and clears it, if an interrupt of the queue comes before `patience` is over.
    fn is_interrupted(&mut self, queue: usize, patience: Duration) -> bool;

    /// Returns true if the device says before `patience` is over that its guest has broken the queue.
    fn is_broken(&mut self, queue: usize, patience: Duration) -> bool;

    /// Reads the first [`blk::CONFIG_BYTES`] of the configuration space.
    fn config(&mut self) -> Vec<u8>;

    /// Writes to the configuration space; whether that is refused or ignored is the transport's business.
    fn write_config(&mut self, offset: u32, bytes: &[u8]);

    /// Resets the device. No queue runs when it returns, and it can be started again.
    fn reset(&mut self);
}

/// A transport that announces to its guest that the disk has grown.
pub(crate) trait Grows: Transport {
    /// Makes the disk larger.
    fn grow(&mut self, disk: &MemDisk, bytes: u64);
}

/// Makes a test of each case for a transport, or of those that are named.
macro_rules! suite {
    ($transport:ty) => {
        crate::conformance::suite! {
            $transport:
            device::features_follow_the_disk
            device::features_not_offered_are_refused
            device::config_follows_the_disk
            device::config_is_read_only_except_the_cache_mode
            device::cache_mode_decides_which_writes_are_durable
            device::cache_mode_is_writethrough_without_flush
            device::reset_drains_requests_in_flight
            device::reset_device_starts_over
            requests::data_is_the_same_for_any_split_of_buffers
            requests::indirect_request_with_status_after_data_is_served
            requests::flush_reaches_the_disk_and_get_id_returns_the_serial
            requests::malformed_requests_fail_without_reaching_the_disk
            requests::short_header_fails
            requests::segments_run_separately_and_are_answered_once
            requests::segments_are_all_checked_before_the_first_runs
            requests::failed_segment_fails_the_request_after_all_end
            requests::disk_errors_become_statuses
            requests::requests_without_their_feature_are_unsupported
            requests::read_only_disk_fails_writes
            requests::raw_file_serves_every_type_on_both_queues
            queues::interrupt_comes_when_the_event_index_is_passed
            queues::interrupt_follows_the_flag_without_event_indices
            queues::queue_needs_only_the_kicks_it_asked_for
            queues::full_queue_is_served
            queues::broken_queue_is_reported_and_takes_nothing_more
            queues::repeated_chain_breaks_the_queue_and_is_answered_once
        }
    };
    ($transport:ty: $($part:ident::$case:ident)+) => {$(
        #[test]
        fn $case() {
            crate::conformance::$part::$case::<$transport>();
        }
    )+};
}
pub(crate) use suite;

/// A guest that drives a device, and the disk in memory that may be behind it.
pub(crate) struct Guest<T> {
    pub(crate) transport: T,
    pub(crate) disk: MemDisk,
}

impl<T: Transport> Guest<T> {
    /// A guest with one queue that has accepted [`ALL`].
    pub(crate) fn new() -> Self {
        Self::with(ALL, 1)
    }

    /// A guest that has accepted `features`, with a queue for each of `queues`.
    pub(crate) fn with(features: u64, queues: u16) -> Self {
        let mut guest = Self::before(MemDisk::new(), queues);
        guest.start(features);
        guest
    }

    /// A guest before it has accepted any features.
    pub(crate) fn before(disk: MemDisk, queues: u16) -> Self {
        Self {
            transport: T::new(disk.disk(), queues, RingKind::Auto),
            disk,
        }
    }

    pub(crate) fn start(&mut self, features: u64) {
        assert!(self.transport.start(features), "{features:#x} is refused");
    }

    pub(crate) fn driver(&mut self, queue: usize) -> &mut Driver {
        self.transport.driver(queue)
    }

    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) {
        self.driver(0).write(address, bytes);
    }

    pub(crate) fn read(&mut self, address: u64, len: usize) -> Vec<u8> {
        self.driver(0).read(address, len)
    }

    /// Shows the device what is staged, and kicks.
    pub(crate) fn publish(&mut self, queue: usize) {
        self.driver(queue).publish();
        self.transport.kick(queue);
    }

    /// Makes a request available. Returns its head.
    pub(crate) fn submit(&mut self, queue: usize, kind: u32, sector: u64, data: &[Part]) -> u16 {
        let head = self.driver(queue).request(kind, sector, data);
        self.publish(queue);
        head
    }

    /// Waits for the next used entry.
    pub(crate) fn answer(&mut self, queue: usize) -> (u32, u32) {
        let mut answer = None;
        wait("an answer", || {
            answer = self.driver(queue).take_used();
            answer.is_some()
        });
        answer.expect("an answer")
    }

    /// Runs one request on a queue. Returns its status and used length.
    pub(crate) fn ask_on(&mut self, queue: usize, kind: u32, sector: u64, data: &[Part]) -> (u8, u32) {
        let head = self.submit(queue, kind, sector, data);
        let (found, len) = self.answer(queue);
        assert_eq!(found, u32::from(head));
        assert_eq!(self.driver(queue).take_used(), None, "one answer");
        (self.driver(queue).status(head), len)
    }

    /// Runs one request on the first queue.
    pub(crate) fn ask(&mut self, kind: u32, sector: u64, data: &[Part]) -> (u8, u32) {
        self.ask_on(0, kind, sector, data)
    }

    /// Writes discard or write-zeroes segments. Returns their buffer.
    pub(crate) fn segments(&mut self, segments: &[(u64, u32, u32)]) -> Part {
        let each = segments.iter();
        let bytes: Vec<u8> = each
            .flat_map(|&(sector, count, flags)| blk::segment(sector, count, flags))
            .collect();
        self.write(DATA, &bytes);
        (DATA, bytes.len() as u32, false)
    }

    /// Waits until the disk holds `count` requests.
    pub(crate) fn wait_held(&self, count: usize) {
        wait("the requests", || self.disk.held() >= count);
    }
}

impl<T> Drop for Guest<T> {
    fn drop(&mut self) {
        // A case that fails must not leave a device that waits for its disk.
        self.disk.release();
    }
}

/// Waits until `condition` holds.
pub(crate) fn wait(what: &str, mut condition: impl FnMut() -> bool) {
    assert!(holds_within(PATIENCE, &mut condition), "still waiting for {what}");
}

/// Returns true if `condition` holds before `patience` is over.
pub(crate) fn holds_within(patience: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if start.elapsed() > patience {
            return false;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Features without several queues, which a guest of one queue is not offered.
pub(crate) fn with_queues(features: u64, queues: u16) -> u64 {
    if queues > 1 { features | F_MQ } else { features }
}
