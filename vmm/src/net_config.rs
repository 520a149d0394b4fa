//! `--net`: a network interface of the guest, as the command line has it.
//!
//! ```text
//! --net tap=tap0,mac=52:54:00:12:34:56
//! --net fd=3
//! ```

use std::os::fd::RawFd;
use std::sync::Arc;

use virtio_devices::transport::{MacAddress, MacAddressError, PciNetworkConfig, Tap, TapError};

use crate::key_value::{self, SyntaxError};
use crate::socket;

/// The entries of a queue that is given no size.
const QUEUE_SIZE: u16 = 256;

/// A network interface.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NetConfig {
    /// The tap interface of the host.
    pub tap: TapPlace,
    /// The address of the guest's interface; a random one of nobody's if it is not said.
    pub mac: Option<MacAddress>,
    /// The most entries of a queue.
    pub queue_size: u16,
}

/// The place of a tap interface.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum TapPlace {
    /// The one of this name.
    Name(String),
    /// The one that this descriptor of the process is attached to.
    Descriptor(RawFd),
}

/// An error of `--net`.
#[derive(Debug, thiserror::Error)]
pub enum NetConfigError {
    /// It is not made of keys and values.
    #[error("--net: {0}")]
    Syntax(#[from] SyntaxError),
    /// A key has a wrong value.
    #[error("--net: {key}={value}: expected {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        expected: &'static str,
    },
    /// An address is none.
    #[error("--net: {0}")]
    Mac(#[from] MacAddressError),
    /// There is no such key.
    #[error("--net: `{0}` is no key of a network interface; expected tap or fd, mac, queue_size")]
    Key(String),
    /// A key is there twice.
    #[error("--net: two values for {0}; expected one")]
    Twice(String),
    /// It does not say which tap interface.
    #[error("--net: expected either tap=NAME or fd=NUMBER")]
    Tap,
    /// Two interfaces are on one tap interface.
    #[error("--net: two interfaces with {0}; expected a tap interface for each")]
    Shared(String),
}

impl NetConfig {
    /// Parses `tap=NAME` or `fd=NUMBER`, with `mac=ADDRESS` and `queue_size=NUMBER`.
    ///
    /// # Errors
    ///
    /// [`NetConfigError`].
    pub fn parse(text: &str) -> Result<Self, NetConfigError> {
        let (mut taps, mut mac, mut queue_size) = (Vec::new(), None, QUEUE_SIZE);
        let mut seen = Vec::new();
        for (key, value) in key_value::items(text)? {
            if seen.contains(&key) {
                return Err(NetConfigError::Twice(key.to_owned()));
            }
            seen.push(key);
            let wrong = |key, expected| NetConfigError::Value {
                key,
                value: value.to_owned(),
                expected,
            };
            match key {
                "tap" if value.is_empty() => return Err(wrong("tap", "the name of a tap interface")),
                "tap" => taps.push(TapPlace::Name(value.to_owned())),
                "fd" => {
                    let number = value.parse().ok().filter(|&number| number >= 0);
                    let number = number.ok_or_else(|| wrong("fd", "the number of a descriptor"))?;
                    taps.push(TapPlace::Descriptor(number));
                }
                "mac" => mac = Some(value.parse()?),
                "queue_size" => {
                    let size = value.parse().ok();
                    let size = size.filter(|size: &u16| size.is_power_of_two() && (16..=1024).contains(size));
                    queue_size = size.ok_or_else(|| wrong("queue_size", "a power of two from 16 to 1024"))?;
                }
                _ => return Err(NetConfigError::Key(key.to_owned())),
            }
        }
        let Ok([tap]) = <[TapPlace; 1]>::try_from(taps) else {
            return Err(NetConfigError::Tap);
        };
        Ok(Self { tap, mac, queue_size })
    }

    /// Parses all values of `--net`.
    ///
    /// # Errors
    ///
    /// [`NetConfigError`].
    pub fn parse_all(texts: &[String]) -> Result<Vec<Self>, NetConfigError> {
        let mut nets = Vec::<Self>::new();
        for text in texts {
            let net = Self::parse(text)?;
            if nets.iter().any(|other| other.tap == net.tap) {
                return Err(NetConfigError::Shared(net.tap.to_string()));
            }
            nets.push(net);
        }
        Ok(nets)
    }

    /// Attaches to the tap interface.
    ///
    /// # Errors
    ///
    /// [`TapError`].
    pub fn open(&self) -> Result<PciNetworkConfig, TapError> {
        let tap = match &self.tap {
            TapPlace::Name(name) => Tap::open(name)?,
            &TapPlace::Descriptor(descriptor) => {
                let claimed = socket::claim(descriptor).map_err(|_| TapError::Descriptor { descriptor })?;
                Tap::from_descriptor(claimed)?
            }
        };
        let mac = self.mac.map_or_else(random_address, Ok)?;
        Ok(PciNetworkConfig {
            tap: Arc::new(tap),
            mac,
            queue_size: self.queue_size,
        })
    }
}

impl std::fmt::Display for TapPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => write!(f, "tap={name}"),
            Self::Descriptor(number) => write!(f, "fd={number}"),
        }
    }
}

fn random_address() -> Result<MacAddress, TapError> {
    let mut bytes = [0; 6];
    getrandom::fill(&mut bytes).map_err(|error| TapError::Open(error.into()))?;
    Ok(MacAddress::local(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_knows_every_key() {
        let net = NetConfig::parse("tap=tap0,mac=52:54:00:12:34:56,queue_size=512").expect("an interface");
        assert_eq!(net.tap, TapPlace::Name("tap0".to_owned()));
        assert_eq!(
            net.mac.map(|mac| mac.to_string()).as_deref(),
            Some("52:54:00:12:34:56")
        );
        assert_eq!(net.queue_size, 512);
        let net = NetConfig::parse("fd=7").expect("an interface");
        assert_eq!(
            (net.tap, net.mac, net.queue_size),
            (TapPlace::Descriptor(7), None, QUEUE_SIZE)
        );
    }

    #[test]
    fn parse_says_what_is_wrong_and_what_would_be_right() {
        for (text, said) in [
            ("", "expected key=value"),
            ("tap0", "expected key=value"),
            ("mac=52:54:00:12:34:56", "expected either tap=NAME or fd=NUMBER"),
            ("tap=a,fd=3", "expected either tap=NAME or fd=NUMBER"),
            ("tap=a,tap=b", "two values for tap"),
            ("tap=", "tap=: expected the name of a tap interface"),
            ("fd=-1", "fd=-1: expected the number of a descriptor"),
            ("tap=a,mac=5", "`5` is no MAC address"),
            (
                "tap=a,queue_size=100",
                "queue_size=100: expected a power of two from 16 to 1024",
            ),
            ("tap=a,queues=2", "`queues` is no key of a network interface"),
        ] {
            let error = NetConfig::parse(text).expect_err(text).to_string();
            assert!(error.starts_with("--net: ") && error.contains(said), "{error}");
        }
        let twice = NetConfig::parse_all(&["tap=a".to_owned(), "tap=a,mac=52:54:00:12:34:56".to_owned()]);
        let error = twice.expect_err("one interface for two").to_string();
        assert!(error.contains("two interfaces with tap=a"), "{error}");
    }

    #[test]
    fn open_says_that_a_descriptor_is_no_tap_interface() {
        let net = NetConfig::parse("fd=99").expect("an interface");
        let error = net.open().expect_err("it is not open").to_string();
        assert!(error.starts_with("descriptor 99 is no tap interface"), "{error}");
    }
}
