//! Registered pages for the requests of a queue, as a kernel driver provides them.
//!
//! A driver takes a request's pages back when it hears of the request's end, whatever is still under way. So at each
//! answer no op may use them any more; and no op may ever have touched what lies beside the request's bytes, or
//! changed what was to be written.

use block::Buffer;
use simulator::Random;
use simulator::pages::{Tags, Way};

use crate::plan::Registered;

/// The bytes of a place.
pub(crate) const PLACE_BYTES: usize = 48 << 10;
/// The byte that fills a place beside a request's bytes.
const BESIDE: u8 = 0xA5;

/// The places of a queue.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) tags: Tags,
    pub(crate) registered: Registered,
}

/// A place that a request has.
#[derive(Debug)]
pub(crate) struct Taken {
    tag: u16,
    skip: usize,
    /// The bytes that it had at first.
    bytes: Vec<u8>,
    /// True if it must still have them at the end.
    stays: bool,
}

impl Places {
    /// A buffer that holds `bytes`, which stay as they are if the request is a write; `None` if this request is not to
    /// have one, or there is no place.
    pub(crate) fn take(&self, bytes: &[u8], stays: bool, random: &mut Random) -> Option<(Buffer, Taken)> {
        let Registered {
            places,
            share,
            unaligned,
            ..
        } = self.registered;
        if !random.chance(share) {
            return None;
        }
        let skip = if unaligned {
            random.pick(&[0, 4, 100, 512, 1000, 1536])
        } else {
            random.pick(&[0, 512, 4096])
        };
        if skip + bytes.len() > PLACE_BYTES {
            return None;
        }
        let align = if skip == 0 {
            4096
        } else {
            1 << skip.trailing_zeros()
        };
        let (tag, buffer) = (0..places).find_map(|tag| {
            let buffer = self.tags.buffer(tag, skip, bytes.len(), align);
            Some((tag, buffer.ok()?))
        })?;
        self.tags.limit(tag, if stays { Way::Taken } else { Way::Filled });
        self.tags.write(tag, 0, &vec![BESIDE; PLACE_BYTES]);
        self.tags.write(tag, skip, bytes);
        let bytes = bytes.to_vec();
        let taken = Taken {
            tag,
            skip,
            bytes,
            stays,
        };
        Some((buffer, taken))
    }

    /// The request has ended: looks at what became of its place.
    pub(crate) fn check(&self, taken: &Taken) -> Result<(), String> {
        let Taken { tag, skip, .. } = *taken;
        let end = skip + taken.bytes.len();
        if let Some(op) = self.tags.holder(tag) {
            return Err(format!(
                "a request was answered while op {op} used its registered pages"
            ));
        }
        let mut place = vec![0; PLACE_BYTES];
        self.tags.read(tag, 0, &mut place);
        let beside = (0..skip).chain(end..PLACE_BYTES);
        if taken.stays && place[skip..end] != taken.bytes {
            return Err("the registered pages of a write were changed".to_owned());
        }
        let touched = beside.into_iter().find(|&at| place[at] != BESIDE);
        match touched {
            Some(at) => Err(format!(
                "byte {at} of registered pages was changed; the request has {skip}..{end}"
            )),
            None => Ok(()),
        }
    }

    /// Copies the request's bytes out.
    pub(crate) fn read(&self, taken: &Taken, out: &mut [u8]) {
        self.tags.read(taken.tag, taken.skip, out);
    }
}
