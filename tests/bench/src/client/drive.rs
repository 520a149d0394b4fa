//! The client's loop: keeps a fixed number of requests in flight, and counts.
//!
//! A client goes through three phases, which its owner announces: warming up (nothing counts),
//! measuring, stopping (what is in flight is awaited, nothing new is started). A server that answers
//! nothing for [`SILENCE`] is given up on.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::ValueEnum;

use super::Connection;
use super::ring::{Kind, Ring, SLOTS_MAX};
use crate::content;
use crate::histogram::Histogram;
use crate::workload::{Offsets, Pattern, Sample, Workload};

/// The longest silence of a server with requests in flight.
const SILENCE: Duration = Duration::from_secs(10);

const WARMING: u8 = 0;
const MEASURING: u8 = 1;
const STOPPING: u8 = 2;

/// A client's way to wait for answers.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Wait {
    /// It looks at the ring without pause: the lowest latency, and one CPU gone.
    Poll,
    /// It sleeps until the server interrupts: leaves the CPUs to servers that use both.
    Sleep,
}

/// The durations of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// Before anything counts. Ignored by [`Pattern::OncePerCluster`], which has nothing to repeat.
    pub(crate) warm_up: Duration,
    /// While it counts, at most.
    pub(crate) measure: Duration,
}

/// The counts of one client.
#[derive(Debug, Default)]
struct Counted {
    latencies: Histogram,
    ops: u64,
    seconds: f64,
}

/// Runs `workload` with one client thread on each of the connection's queues and adds them up.
/// `cpu_seconds` answers what the server has used so far; it is asked before and after.
///
/// # Errors
///
/// If a request fails, the server falls silent, or its CPU time cannot be read.
pub(crate) fn run(
    connection: Connection,
    workload: &Workload,
    wait: Wait,
    timing: Timing,
    cpu_seconds: &dyn Fn() -> io::Result<f64>,
) -> io::Result<Sample> {
    let once = workload.pattern == Pattern::OncePerCluster;
    let phase = AtomicU8::new(if once { MEASURING } else { WARMING });
    let clients = connection.rings.len();
    let mut sample = Sample::default();
    std::thread::scope(|scope| {
        let (finished, results) = mpsc::channel();
        let mut cpu_before = if once { cpu_seconds()? } else { 0.0 };
        for (seed, ring) in (1..).zip(connection.rings) {
            let (phase, finished) = (&phase, finished.clone());
            scope.spawn(move || {
                let counted = Client::new(ring, workload, seed).run(wait, phase);
                // A receiver that is gone has already failed for another reason.
                let _nobody_listens = finished.send(counted);
            });
        }
        drop(finished);
        let mut done = Vec::new();
        if !once {
            // A client that ends while warming up has failed; its error is found below.
            if let Ok(early) = results.recv_timeout(timing.warm_up) {
                done.push(early);
            }
            cpu_before = cpu_seconds()?;
            phase.store(MEASURING, Ordering::Release);
        }
        if done.is_empty()
            && let Ok(early) = results.recv_timeout(timing.measure)
        {
            done.push(early);
        }
        let cpu_at_stop = if done.is_empty() && !once {
            Some(cpu_seconds())
        } else {
            None
        };
        phase.store(STOPPING, Ordering::Release);
        done.extend(results.iter());
        // What is written once counts until its flush has ended.
        let cpu_after = cpu_at_stop.unwrap_or_else(cpu_seconds)?;

        let mut latencies = Histogram::default();
        let mut rate = 0.0;
        for counted in done {
            let counted = counted?;
            sample.ops += counted.ops;
            rate += counted.ops as f64 / counted.seconds.max(1e-9);
            latencies.merge(&counted.latencies);
        }
        sample.seconds = if rate > 0.0 { sample.ops as f64 / rate } else { 0.0 };
        sample.mean_us = latencies.mean_us();
        sample.p99_us = latencies.percentile_us(0.99);
        sample.p999_us = latencies.percentile_us(0.999);
        sample.longest_us = latencies.percentile_us(1.0);
        sample.cpu_seconds = cpu_after - cpu_before;
        if sample.ops == 0 {
            return Err(io::Error::other(format!(
                "{clients} clients, but no request completed"
            )));
        }
        Ok(sample)
    })
}

/// Reads `blocks` blocks of a disk that was filled by [`content`] and compares them, so that no figure
/// is taken from a server that answers with something else.
///
/// # Errors
///
/// If a read fails or answers other bytes; the message names the offset.
pub(crate) fn verify(connection: &mut Connection, disk_bytes: u64, blocks: u32) -> io::Result<()> {
    let Some(ring) = connection.rings.first_mut() else {
        return Ok(());
    };
    let mut found = vec![0; content::BLOCK_BYTES];
    for offset in content::samples(disk_bytes, connection.block_bytes, blocks) {
        ring.push(0, Kind::Read, offset);
        ring.publish()?;
        let status = await_one(ring)?;
        check(status, Kind::Read, offset)?;
        ring.copy_data(0, &mut found);
        content::check(offset, &found)?;
    }
    Ok(())
}

/// Waits for the only request in flight; answers its status.
fn await_one(ring: &mut Ring) -> io::Result<u8> {
    let since = Instant::now();
    loop {
        if let Some((_, status)) = ring.pop()? {
            return Ok(status);
        }
        if since.elapsed() > SILENCE {
            return Err(silent());
        }
        ring.wait(Duration::from_millis(100))?;
    }
}

fn silent() -> io::Error {
    io::Error::new(
        io::ErrorKind::TimedOut,
        format!("the server has not answered for {} s", SILENCE.as_secs()),
    )
}

fn check(status: u8, kind: Kind, offset: u64) -> io::Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{kind:?} at {offset:#x} ended with virtio-blk status {status}"
    )))
}

/// The request in a slot.
#[derive(Clone, Copy, Debug)]
struct Slot {
    kind: Kind,
    offset: u64,
    started_ns: u64,
}

/// One client on one queue.
struct Client<'a> {
    ring: Ring,
    workload: &'a Workload,
    offsets: Offsets,
    slots: Vec<Slot>,
    in_flight: u16,
    /// The time of the last look at the clock, from the start of the client.
    now_ns: u64,
    start: Instant,
    counted: Counted,
    counting: bool,
    measured_from_ns: u64,
}

impl<'a> Client<'a> {
    fn new(ring: Ring, workload: &'a Workload, seed: u64) -> Self {
        assert!(workload.depth <= SLOTS_MAX, "a queue holds {SLOTS_MAX} requests");
        Self {
            ring,
            workload,
            offsets: Offsets::new(workload, seed),
            slots: vec![
                Slot {
                    kind: Kind::Read,
                    offset: 0,
                    started_ns: 0
                };
                usize::from(workload.depth)
            ],
            in_flight: 0,
            now_ns: 0,
            start: Instant::now(),
            counted: Counted::default(),
            counting: true,
            measured_from_ns: 0,
        }
    }

    /// Runs until told to stop, or until there is nothing left to do.
    fn run(mut self, wait: Wait, phase: &AtomicU8) -> io::Result<Counted> {
        let mut seen = phase.load(Ordering::Acquire);
        let mut more = true;
        for slot in 0..self.workload.depth {
            more = more && self.start_next(slot);
        }
        self.ring.publish()?;
        while self.in_flight > 0 {
            let now = phase.load(Ordering::Relaxed);
            if now != seen {
                seen = now;
                self.look_at_clock();
                if seen == MEASURING {
                    self.counted.latencies.clear();
                    self.counted.ops = 0;
                    self.measured_from_ns = self.now_ns;
                } else {
                    more = false;
                    if self.workload.pattern != Pattern::OncePerCluster {
                        self.stop_counting();
                    }
                }
            }
            self.round(wait, &mut more)?;
        }
        if self.workload.pattern == Pattern::OncePerCluster {
            self.submit(0, Kind::Flush, 0);
            self.ring.publish()?;
            while self.in_flight > 0 {
                self.await_some(Wait::Sleep)?;
                while let Some((_, status)) = self.ring.pop()? {
                    self.in_flight -= 1;
                    check(status, Kind::Flush, 0)?;
                }
            }
            self.look_at_clock();
            self.stop_counting();
        }
        Ok(self.counted)
    }

    /// Waits for answers, takes them all, and starts as many requests as ended.
    #[inline]
    fn round(&mut self, wait: Wait, more: &mut bool) -> io::Result<()> {
        let mut next = self.ring.pop()?;
        if next.is_none() {
            self.await_some(wait)?;
            next = self.ring.pop()?;
            if next.is_none() {
                return Ok(());
            }
        }
        self.look_at_clock();
        while let Some((slot, status)) = next {
            self.in_flight -= 1;
            let Some(&ended) = self.slots.get(usize::from(slot)) else {
                return Err(io::Error::other(format!(
                    "the server finished slot {slot}, which is not in use"
                )));
            };
            check(status, ended.kind, ended.offset)?;
            if self.workload.pattern == Pattern::WriteFlush && ended.kind == Kind::Write {
                self.submit(slot, Kind::Flush, ended.offset);
                self.slots[usize::from(slot)].started_ns = ended.started_ns;
            } else {
                if self.counting {
                    self.counted.ops += 1;
                    self.counted.latencies.record(self.now_ns - ended.started_ns);
                }
                if *more {
                    *more = self.start_next(slot);
                }
            }
            next = self.ring.pop()?;
        }
        self.ring.publish()
    }

    /// Starts the next request of the workload in `slot`; `false` if there is none.
    #[inline]
    fn start_next(&mut self, slot: u16) -> bool {
        let Some(offset) = self.offsets.next_offset() else {
            return false;
        };
        let kind = if self.workload.pattern.writes() {
            Kind::Write
        } else {
            Kind::Read
        };
        self.submit(slot, kind, offset);
        true
    }

    #[inline]
    fn submit(&mut self, slot: u16, kind: Kind, offset: u64) {
        self.ring.push(slot, kind, offset);
        self.slots[usize::from(slot)] = Slot {
            kind,
            offset,
            started_ns: self.now_ns,
        };
        self.in_flight += 1;
    }

    /// Returns when something may have ended.
    fn await_some(&mut self, wait: Wait) -> io::Result<()> {
        let since = Instant::now();
        loop {
            match wait {
                Wait::Poll => {
                    for _ in 0..256 {
                        if self.ring.has_ended() {
                            return Ok(());
                        }
                        std::hint::spin_loop();
                    }
                }
                Wait::Sleep => {
                    self.ring.wait(Duration::from_millis(100))?;
                    if self.ring.has_ended() {
                        return Ok(());
                    }
                }
            }
            if since.elapsed() > SILENCE {
                return Err(silent());
            }
            if crate::interrupted() {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "interrupted"));
            }
        }
    }

    #[inline]
    fn look_at_clock(&mut self) {
        self.now_ns = self.start.elapsed().as_nanos() as u64;
    }

    /// Fixes the time that the counted operations took. What still ends afterwards no longer counts.
    fn stop_counting(&mut self) {
        self.counting = false;
        self.counted.seconds = (self.now_ns - self.measured_from_ns) as f64 / 1e9;
    }
}

#[cfg(test)]
mod tests {
    use super::super::null_device::NullDevice;
    use super::*;

    const DISK_BYTES: u64 = 1 << 20;

    /// Drives a null device of `device_bytes` as if it were of `disk_bytes`.
    fn drive(
        pattern: Pattern,
        depth: u16,
        wait: Wait,
        disk_bytes: u64,
        device_bytes: u64,
    ) -> io::Result<Sample> {
        let (_device, connection) = NullDevice::start(device_bytes, 4096)?;
        let workload = Workload {
            pattern,
            block_bytes: 4096,
            depth,
            disk_bytes,
        };
        let ten = Duration::from_millis(10);
        run(
            connection,
            &workload,
            wait,
            Timing {
                warm_up: ten,
                measure: ten * 5,
            },
            &|| Ok(0.0),
        )
    }

    #[test]
    fn drive_runs_every_pattern_at_every_depth_and_wait() {
        use Pattern::{RandomRead, RandomWrite, SequentialRead, SequentialWrite, WriteFlush};
        for pattern in [
            RandomRead,
            RandomWrite,
            SequentialRead,
            SequentialWrite,
            WriteFlush,
        ] {
            for depth in [1, 2, 64, SLOTS_MAX] {
                for wait in [Wait::Poll, Wait::Sleep] {
                    let sample = drive(pattern, depth, wait, DISK_BYTES, DISK_BYTES);
                    let ran = sample.is_ok_and(|sample| sample.ops > 0 && sample.seconds > 0.0);
                    assert!(ran, "{pattern:?} {depth} deep, {wait:?}");
                }
            }
        }
    }

    #[test]
    fn once_per_cluster_counts_every_cluster_and_ends() -> io::Result<()> {
        let sample = drive(Pattern::OncePerCluster, 7, Wait::Poll, DISK_BYTES, DISK_BYTES)?;
        assert_eq!(sample.ops, DISK_BYTES / crate::workload::CLUSTER_BYTES);
        Ok(())
    }

    #[test]
    fn drive_names_the_offset_of_a_failed_request() {
        let failed = drive(Pattern::SequentialRead, 1, Wait::Sleep, DISK_BYTES, 4096);
        let text = failed.map_err(|error| error.to_string());
        assert!(text.is_err_and(|text| text.contains("0x1000 ") && text.contains("status 1")));
    }
}
