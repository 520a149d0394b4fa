//! The host's side of a ublk queue: the block layer, which makes the planned requests and gives them to the driver.
//!
//! Requests longer than the device takes become several, each under a tag of its own, and are answered when all of
//! them are. What the driver's [model](virtio_devices::ublk::model) has been committed counts at once.
//!
//! Invariant: a request that a server was killed with, and that the next one does again, stays one request. Until it is
//! answered, the oracle takes it for one in flight, which may show, and show again over what was answered meanwhile.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use block::{Context, Disk, IoError, Op};
use qcow::QcowDisk;
use simulator::{Random, SECTOR};
use virtio_devices::ublk::abi::op;
use virtio_devices::ublk::model::{Io, Model};

use crate::book::{Book, Entry};
use crate::content::bytes_of;
use crate::plan::{Ask, Planned, Ublk};

/// A request of the host's, which may be several of the driver's.
#[derive(Debug)]
struct Bio {
    /// Of the driver's requests, those that were not answered.
    left: usize,
    /// The bytes that were read.
    data: Vec<u8>,
    /// The errno of the first of them that failed.
    error: Option<i32>,
    /// The driver itself has answered one: it had no server.
    by_driver: bool,
}

/// The host's end of one queue.
#[derive(Debug)]
pub(crate) struct HostQueue {
    number: usize,
    model: Model,
    ublk: Ublk,
    /// The context and the disk of the server, if there is one.
    server: Option<(Context, Arc<QcowDisk>)>,
    book: Book,
    plan: VecDeque<Planned>,
    depth: usize,
    /// By their number in the book.
    bios: BTreeMap<usize, Bio>,
    /// By the driver's number: whose part it is, and where its bytes are in that.
    parts: BTreeMap<usize, (usize, usize)>,
    random: Random,
}

impl HostQueue {
    /// The host's end of queue `number`, which asks what `book` was made for.
    pub(crate) fn new(
        number: usize,
        model: Model,
        ublk: Ublk,
        book: Book,
        plan: VecDeque<Planned>,
        depth: usize,
        seed: u64,
    ) -> Self {
        Self {
            number,
            model,
            ublk,
            server: None,
            book,
            plan,
            depth,
            bios: BTreeMap::new(),
            parts: BTreeMap::new(),
            random: Random::new(seed),
        }
    }

    /// The driver's end.
    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// There is a server, or none any more.
    pub(crate) fn set_server(&mut self, server: Option<(Context, Arc<QcowDisk>)>) {
        self.server = server;
    }

    /// The host's turn. Returns whether it did anything.
    pub(crate) fn turn(&mut self) -> Result<bool, String> {
        let grown = self.book.take_growth();
        let mut any = self.book.note_growth(grown);
        if self.random.chance(self.ublk.unregistered) {
            self.model.fail_registrations(1 + self.random.below(3) as u32);
        }
        while let Some(&next) = self.plan.front() {
            let alone = next.alone && self.book.in_flight > 0;
            let full = self.book.in_flight >= self.depth;
            if alone || full || (any && self.random.one_in(2)) || !self.ask(next) {
                break;
            }
            self.plan.pop_front();
            any = true;
        }
        Ok(any)
    }

    /// Asks what is planned. `false` if that cannot be now.
    fn ask(&mut self, planned: Planned) -> bool {
        if let Ask::Grow(bytes) = planned.ask {
            if let Some((cx, disk)) = &self.server {
                self.book.grow(cx, disk, planned, bytes);
            }
            return self.server.is_some();
        }
        let Some(info) = self.server.as_ref().map(|(_, disk)| disk.info()) else {
            // Requests reach the driver all the same, but for those of which nobody knows whether they may be asked.
            if matches!(planned.ask, Ask::Discard | Ask::Zeroes { .. }) {
                return false;
            }
            self.submit(planned);
            return true;
        };
        let offered = match planned.ask {
            Ask::Discard => info.discard,
            Ask::Zeroes { .. } => info.write_zeroes,
            _ => true,
        };
        if offered {
            self.submit(planned);
        } else {
            self.book.skip();
        }
        true
    }

    fn submit(&mut self, planned: Planned) {
        let Some(Entry {
            tag,
            op: asked,
            words,
        }) = self.book.ask(planned)
        else {
            return;
        };
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        let (code, flags) = match asked {
            Op::Read => (op::READ, 0),
            Op::Write { fua } => (op::WRITE, flag(fua, op::FLAG_FUA)),
            Op::Flush => (op::FLUSH, 0),
            Op::Discard => (op::DISCARD, 0),
            Op::WriteZeroes { unmap, fua } => (
                op::WRITE_ZEROES,
                flag(fua, op::FLAG_FUA) | flag(!unmap, op::FLAG_NOUNMAP),
            ),
        };
        let (first, count) = match asked {
            Op::Flush => (0, 0),
            _ => (planned.first, planned.count),
        };
        let moves = matches!(asked, Op::Read | Op::Write { .. });
        let most = match moves {
            true => u64::from(self.ublk.io_bytes_max) / SECTOR as u64,
            false => u64::MAX,
        };
        let data = match asked {
            Op::Read => vec![0xCC; count as usize * SECTOR],
            _ => bytes_of(&words),
        };
        let mut ios = Vec::new();
        let mut from = 0;
        loop {
            let sectors = most.min(count - from);
            let at = from as usize * SECTOR;
            let mut io = Io::new(code, first + from, sectors as u32).flags(flags);
            let len = io.data.len();
            io.data.copy_from_slice(&data[at..at + len]);
            ios.push((at, io));
            from += sectors;
            if from == count {
                break;
            }
        }
        self.book.record.borrow_mut().reached.split += u64::from(ios.len() > 1);
        let bio = Bio {
            left: ios.len(),
            data,
            error: None,
            by_driver: false,
        };
        self.bios.insert(tag, bio);
        for (at, io) in ios {
            let number = self.model.request(io);
            self.parts.insert(number, (tag, at));
        }
    }

    /// Looks what was committed since the last time.
    ///
    /// # Errors
    ///
    /// Says what the server did that it must not do.
    pub(crate) fn observe(&mut self) -> Result<(), String> {
        for (number, io) in self.model.take_answered() {
            let Some((tag, at)) = self.parts.remove(&number) else {
                return Err(format!(
                    "queue {}: request {number} was answered twice",
                    self.number
                ));
            };
            let Some(bio) = self.bios.get_mut(&tag) else {
                return Err(format!("queue {}: an answer comes to nothing", self.number));
            };
            bio.left -= 1;
            bio.by_driver |= io.by_driver;
            match io.result {
                Some(result @ ..0) => bio.error = bio.error.or(Some(-result)),
                _ if io.op == op::READ => bio.data[at..at + io.data.len()].copy_from_slice(&io.data),
                _ => {}
            }
            if bio.left == 0
                && let Some(bio) = self.bios.remove(&tag)
            {
                self.answer(tag, &bio);
            }
        }
        match self.model.take_fault() {
            None => Ok(()),
            Some(text) => Err(format!("queue {}: {text}", self.number)),
        }
    }

    fn answer(&mut self, tag: usize, bio: &Bio) {
        let result = bio.error.map_or(Ok(()), |errno| Err(error(errno)));
        // What has no server may fail, whatever the disk is like.
        let mut record = self.book.record.borrow_mut();
        record.reached.by_driver += u64::from(bio.by_driver);
        let excused = record.may_fail;
        record.may_fail |= bio.by_driver;
        record.by_driver = bio.by_driver;
        drop(record);
        self.book.answer(tag, result, |bytes| {
            let whole = bytes.len() == bio.data.len();
            if whole {
                bytes.copy_from_slice(&bio.data);
            }
            whole
        });
        let mut record = self.book.record.borrow_mut();
        record.may_fail = excused;
        record.by_driver = false;
    }
}

/// The disk's error that a server makes such an errno of. Only what the host did may come of a disk that fails.
fn error(errno: i32) -> IoError {
    const INVALID: i32 = rustix::io::Errno::INVAL.raw_os_error();
    const UNSUPPORTED: i32 = rustix::io::Errno::OPNOTSUPP.raw_os_error();
    match errno {
        INVALID => IoError::OutOfRange,
        UNSUPPORTED => IoError::Unsupported,
        errno => IoError::Host { errno },
    }
}

impl fmt::Display for HostQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "queue {}, {} planned, {} in flight of {} of the host's requests, {} commands",
            self.number,
            self.plan.len(),
            self.parts.len(),
            self.bios.len(),
            self.model.fetches()
        )
    }
}
