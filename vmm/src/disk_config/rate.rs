//! Rate limits as texts say them: keys of a disk, and `--rate-limit-group`.
//!
//! A limit is a size and a refill time, both or neither; a burst is a part of one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use block::throttle::{Limiter, Rate, RateLimits};

use serde_json::{Map, Value};

use super::{DiskConfig, DiskConfigError, keys};
use crate::error::CommandFailure;
use crate::key_value::{self, SyntaxError};

/// The keys of each limit: size, burst, time.
const BANDWIDTH: [&str; 3] = ["bw_size", "bw_one_time_burst", "bw_refill_time"];
const OPS: [&str; 3] = ["ops_size", "ops_one_time_burst", "ops_refill_time"];

/// One limit's keys, as far as they were given.
#[derive(Default)]
struct RateKeys {
    size: Option<u64>,
    one_time_burst: Option<u64>,
    refill_ms: Option<u32>,
}

impl RateKeys {
    /// Returns the limit, if there is one. The error is a key that was given, and the one that is missing beside it.
    fn build(
        &self,
        [size, burst, refill]: [&'static str; 3],
    ) -> Result<Option<Rate>, (&'static str, &'static str)> {
        match (self.size, self.refill_ms) {
            (Some(tokens), Some(millis)) => Ok(Some(Rate {
                size: tokens,
                refill: Duration::from_millis(millis.into()),
                one_time_burst: self.one_time_burst.unwrap_or(0),
            })),
            (Some(_), None) => Err((size, refill)),
            (None, Some(_)) => Err((refill, size)),
            (None, None) if self.one_time_burst.is_some() => Err((burst, size)),
            (None, None) => Ok(None),
        }
    }
}

/// The keys of both limits, as far as they were given.
#[derive(Default)]
pub(super) struct LimitKeys {
    bandwidth: RateKeys,
    ops: RateKeys,
}

impl LimitKeys {
    /// Stores one value. `None` if the key is not about limits, `Some(None)` if it does not take the value.
    pub(super) fn try_set(&mut self, key: &str, value: &str) -> Option<Option<()>> {
        let bytes = || crate::size::parse_bytes(value).ok().filter(|&bytes| bytes > 0);
        let plain = value.bytes().all(|byte| byte.is_ascii_digit());
        let count = || value.parse().ok().filter(|&count: &u64| plain && count > 0);
        let millis = || value.parse().ok().filter(|&millis: &u32| plain && millis > 0);
        let (bandwidth, ops) = (&mut self.bandwidth, &mut self.ops);
        Some(match key {
            "bw_size" => bytes().map(|bytes| bandwidth.size = Some(bytes)),
            "bw_one_time_burst" => bytes().map(|bytes| bandwidth.one_time_burst = Some(bytes)),
            "bw_refill_time" => millis().map(|millis| bandwidth.refill_ms = Some(millis)),
            "ops_size" => count().map(|count| ops.size = Some(count)),
            "ops_one_time_burst" => count().map(|count| ops.one_time_burst = Some(count)),
            "ops_refill_time" => millis().map(|millis| ops.refill_ms = Some(millis)),
            _ => return None,
        })
    }

    /// Returns the limits. The error is a key that was given, and the one that is missing beside it.
    pub(super) fn build(&self) -> Result<RateLimits, (&'static str, &'static str)> {
        Ok(RateLimits {
            bandwidth: self.bandwidth.build(BANDWIDTH)?,
            ops: self.ops.build(OPS)?,
        })
    }
}

/// Parses limits alone: keys with their values, all of them about limits.
///
/// # Errors
///
/// [`DiskConfigError`], naming the key and what it takes.
pub(crate) fn parse<'a>(
    items: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<RateLimits, DiskConfigError> {
    let mut limits = LimitKeys::default();
    for (name, value) in items {
        let key = keys::find(name)?;
        let taken = limits.try_set(key.name, value);
        let taken = taken.ok_or(DiskConfigError::NotHere {
            key: key.name,
            place: "only the keys bw_… and ops_… are limits",
        })?;
        taken.ok_or_else(|| DiskConfigError::Value {
            key: key.name,
            value: value.to_owned(),
            takes: key.takes,
        })?;
    }
    let incomplete = |(key, missing)| DiskConfigError::Incomplete {
        key,
        missing,
        takes: takes(missing),
    };
    limits.build().map_err(incomplete)
}

/// Returns limits as an object of the keys that set them.
pub(crate) fn to_json(limits: &RateLimits) -> Value {
    let mut object = Map::new();
    for (rate, [size, burst, refill]) in [(limits.bandwidth, BANDWIDTH), (limits.ops, OPS)] {
        let Some(rate) = rate else { continue };
        object.insert(size.to_owned(), rate.size.into());
        if rate.one_time_burst > 0 {
            object.insert(burst.to_owned(), rate.one_time_burst.into());
        }
        let millis = u64::try_from(rate.refill.as_millis()).unwrap_or(u64::MAX);
        object.insert(refill.to_owned(), millis.into());
    }
    Value::Object(object)
}

/// A disk's place in a group: the group's name and, once it has [joined](RateLimitGroups::join), its tokens.
#[derive(Clone, Debug)]
pub struct GroupMember {
    id: String,
    limiter: Option<Arc<Limiter>>,
}

/// Two are equal that name the same group.
impl PartialEq for GroupMember {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for GroupMember {}

impl GroupMember {
    /// A member that has not joined yet.
    #[must_use]
    pub fn of(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            limiter: None,
        }
    }

    /// The group.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The group's tokens, if the disk has joined.
    #[must_use]
    pub fn limiter(&self) -> Option<&Arc<Limiter>> {
        self.limiter.as_ref()
    }
}

/// An invalid `--rate-limit-group`.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RateLimitGroupError {
    /// It is not made of `key=value` items.
    #[error("--rate-limit-group: {0}")]
    Syntax(#[from] SyntaxError),
    /// No such key.
    #[error("--rate-limit-group: unknown key `{key}`; the keys are {}", KEYS.join(", "))]
    UnknownKey {
        /// The key.
        key: String,
    },
    /// The key is there twice.
    #[error("--rate-limit-group: `{key}` is given more than once")]
    Duplicate {
        /// The key.
        key: &'static str,
    },
    /// The value is not one the key takes.
    #[error("--rate-limit-group: `{key}={value}`: {key} takes {takes}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value, as given.
        value: String,
        /// Its permitted values.
        takes: &'static str,
    },
    /// Something that it needs is missing.
    #[error("--rate-limit-group: `{key}` is given without `{missing}`, which takes {takes}")]
    Incomplete {
        /// The key that is there.
        key: &'static str,
        /// The key that is not.
        missing: &'static str,
        /// The permitted values of that key.
        takes: &'static str,
    },
    /// There is no name.
    #[error("--rate-limit-group: `id` is missing; it takes a name")]
    NoId,
    /// Nothing is limited.
    #[error(
        "--rate-limit-group: `{id}` limits nothing; expected bw_size with bw_refill_time, or ops_size with ops_refill_time"
    )]
    NoLimit {
        /// The group.
        id: String,
    },
    /// No disk is in the group.
    #[error("--rate-limit-group: no disk has `rate_limit_group={id}`, so the group limits nothing")]
    Unused {
        /// The group.
        id: String,
    },
    /// Two groups have one name.
    #[error("--rate-limit-group: two groups have the id `{id}`")]
    SameId {
        /// The name.
        id: String,
    },
}

impl From<RateLimitGroupError> for CommandFailure {
    fn from(error: RateLimitGroupError) -> Self {
        Self::Usage(error.to_string())
    }
}

impl RateLimitGroupError {
    /// The key that it is about, if it is about one.
    pub(crate) fn key(&self) -> Option<&str> {
        match self {
            Self::UnknownKey { key } => Some(key),
            Self::Duplicate { key } | Self::Value { key, .. } | Self::Incomplete { key, .. } => Some(key),
            Self::SameId { .. } => Some("id"),
            Self::Syntax(_) | Self::NoId | Self::NoLimit { .. } | Self::Unused { .. } => None,
        }
    }
}

/// The keys of a group.
const KEYS: [&str; 7] = [
    "id",
    "bw_size",
    "bw_one_time_burst",
    "bw_refill_time",
    "ops_size",
    "ops_one_time_burst",
    "ops_refill_time",
];

fn takes(key: &str) -> &'static str {
    keys::find(key).map_or("", |key| key.takes)
}

/// Describes the existing groups, for the error about an unknown one.
pub(super) fn known(known: &[String]) -> String {
    if known.is_empty() {
        return "there is no --rate-limit-group".to_owned();
    }
    format!(
        "there is no such --rate-limit-group; there are: {}",
        known.join(", ")
    )
}

/// The groups of a command line. Clones share their tokens.
#[derive(Clone, Debug, Default)]
pub struct RateLimitGroups {
    groups: BTreeMap<String, Group>,
}

#[derive(Clone, Debug)]
struct Group {
    limiter: Arc<Limiter>,
    /// The limits that were configured, which an operator may have changed since.
    configured: RateLimits,
}

impl RateLimitGroups {
    /// Parses the values of all `--rate-limit-group`.
    ///
    /// # Errors
    ///
    /// [`RateLimitGroupError`], naming the key and what it takes.
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a String>) -> Result<Self, RateLimitGroupError> {
        let mut groups = Self::default();
        for text in texts {
            groups.add(key_value::items(text)?)?;
        }
        Ok(groups)
    }

    /// Adds a group that is described by keys and values.
    ///
    /// # Errors
    ///
    /// [`RateLimitGroupError`], naming the key and what it takes.
    pub(crate) fn add<'a>(
        &mut self,
        items: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), RateLimitGroupError> {
        let (id, configured) = group(items)?;
        let limiter = Limiter::new(&configured);
        let group = Group { limiter, configured };
        match self.groups.insert(id.clone(), group) {
            Some(_) => Err(RateLimitGroupError::SameId { id }),
            None => Ok(()),
        }
    }

    /// The ids of all groups, in order.
    pub(crate) fn ids(&self) -> impl Iterator<Item = &String> {
        self.groups.keys()
    }

    /// Fails if a group has no disk, after all have joined that will.
    ///
    /// # Errors
    ///
    /// [`RateLimitGroupError::Unused`].
    pub fn check_joined(&self) -> Result<(), RateLimitGroupError> {
        let mut unused = self
            .groups
            .iter()
            .filter(|(_, group)| Arc::strong_count(&group.limiter) == 1);
        match unused.next() {
            Some((id, _)) => Err(RateLimitGroupError::Unused { id: id.clone() }),
            None => Ok(()),
        }
    }

    /// Makes the groups those of `new`. One that stays keeps its members, and also its limits if they are configured as before.
    /// Returns those that get others.
    pub(crate) fn follow(&mut self, new: &Self) -> Vec<(String, RateLimits)> {
        let mut changed = Vec::new();
        let mut groups = new.groups.clone();
        for (id, group) in &mut groups {
            let Some(old) = self.groups.get(id) else { continue };
            if old.configured != group.configured {
                old.limiter.set(&group.configured);
                changed.push((id.clone(), group.configured));
            }
            group.limiter = Arc::clone(&old.limiter);
        }
        self.groups = groups;
        changed
    }

    /// Lets a disk into the group that it names, if it names one.
    ///
    /// # Errors
    ///
    /// [`DiskConfigError::UnknownGroup`].
    pub fn join(&self, disk: &mut DiskConfig) -> Result<(), DiskConfigError> {
        if let Some(member) = &mut disk.rate_limit_group {
            let group = self.groups.get(&member.id);
            let group = group.ok_or_else(|| DiskConfigError::UnknownGroup {
                id: member.id.clone(),
                known: self.groups.keys().cloned().collect(),
            })?;
            member.limiter = Some(Arc::clone(&group.limiter));
        }
        Ok(())
    }
}

/// One group's name and limits.
fn group<'a>(
    items: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<(String, RateLimits), RateLimitGroupError> {
    let mut id = None;
    let mut limits = LimitKeys::default();
    let mut seen: Vec<&'static str> = Vec::new();
    for (name, value) in items {
        let key = KEYS.iter().find(|key| **key == name);
        let Some(&key) = key else {
            let key = name.to_owned();
            return Err(RateLimitGroupError::UnknownKey { key });
        };
        if seen.contains(&key) {
            return Err(RateLimitGroupError::Duplicate { key });
        }
        seen.push(key);
        let taken = match limits.try_set(key, value) {
            None => super::values::non_empty(value).map(|value| id = Some(value.to_owned())),
            Some(taken) => taken,
        };
        taken.ok_or_else(|| RateLimitGroupError::Value {
            key,
            value: value.to_owned(),
            takes: takes(key),
        })?;
    }
    let id = id.ok_or(RateLimitGroupError::NoId)?;
    let limits = limits
        .build()
        .map_err(|(key, missing)| RateLimitGroupError::Incomplete {
            key,
            missing,
            takes: takes(missing),
        })?;
    if limits.is_empty() {
        return Err(RateLimitGroupError::NoLimit { id });
    }
    Ok((id, limits))
}
