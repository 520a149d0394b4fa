//! Rate-limit groups of a server: those of its command line, and those that devices to recover were made with.
//!
//! The saved state of a device holds the text of its group. Devices of one server with the same text share the
//! tokens, as before.

use std::collections::BTreeMap;

use block::throttle::RateLimits;

use crate::disk_config::{DiskConfig, RateLimitGroups};
use crate::error::CommandFailure;

/// The groups that disks can join.
#[derive(Debug)]
pub(super) struct Groups {
    /// All of the command line.
    given: RateLimitGroups,
    /// Each of them, by its text; and those remembered.
    by_text: BTreeMap<String, RateLimitGroups>,
    texts: Vec<String>,
}

impl Groups {
    /// Those of `--rate-limit-group`.
    ///
    /// # Errors
    ///
    /// If one is invalid.
    pub(super) fn parse(texts: &[String]) -> Result<Self, CommandFailure> {
        Ok(Self {
            given: RateLimitGroups::parse(texts)?,
            by_text: BTreeMap::new(),
            texts: texts.to_vec(),
        })
    }

    /// Makes the groups of the command line those of `new`. One that stays keeps its members. Answers those that get other limits.
    ///
    /// # Errors
    ///
    /// If one is invalid.
    pub(super) fn follow(&mut self, new: &[String]) -> Result<Vec<(String, RateLimits)>, CommandFailure> {
        let given = RateLimitGroups::parse(new)?;
        let mut changed = Vec::new();
        for text in new {
            let one = RateLimitGroups::parse([text])?;
            let before = self.texts.iter().find(|before| {
                let before = self.by_text.get(*before);
                before.is_some_and(|before| before.ids().eq(one.ids()))
            });
            if let Some(mut members) = before.cloned().and_then(|before| self.by_text.remove(&before)) {
                changed.extend(members.follow(&one));
                self.by_text.insert(text.clone(), members);
            }
        }
        self.texts = new.to_vec();
        self.given = given;
        Ok(changed)
    }

    /// Lets a disk into the group that it names, if it names one: a group of the command line, or else the one
    /// `remembered`. Answers the text of that group.
    ///
    /// # Errors
    ///
    /// If there is no such group.
    pub(super) fn join(
        &mut self,
        disk: &mut DiskConfig,
        remembered: Option<&str>,
    ) -> Result<Option<String>, CommandFailure> {
        if disk.rate_limit_group.is_none() {
            return Ok(None);
        }
        let texts = self.texts.iter().map(String::as_str).chain(remembered);
        for text in texts {
            let groups = match self.by_text.get(text) {
                Some(groups) => groups,
                None => {
                    let groups = RateLimitGroups::parse([&text.to_owned()])?;
                    self.by_text.entry(text.to_owned()).or_insert(groups)
                }
            };
            if groups.join(disk).is_ok() {
                return Ok(Some(text.to_owned()));
            }
        }
        // Says which there are.
        self.given.join(disk)?;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn member(groups: &mut Groups, remembered: Option<&str>) -> (DiskConfig, Option<String>) {
        let mut disk = DiskConfig::parse("path=a,rate_limit_group=slow").expect("a disk");
        let text = groups.join(&mut disk, remembered).expect("it joins");
        (disk, text)
    }

    fn same(one: &DiskConfig, other: &DiskConfig) -> bool {
        let limiter = |disk: &DiskConfig| {
            disk.rate_limit_group
                .as_ref()
                .and_then(|group| group.limiter().cloned())
        };
        matches!((limiter(one), limiter(other)), (Some(one), Some(other)) if Arc::ptr_eq(&one, &other))
    }

    #[test]
    fn join_shares_equal_groups_and_prefers_the_command_line() {
        let (slow, slower) = (
            "id=slow,ops_size=10,ops_refill_time=100",
            "id=slow,ops_size=5,ops_refill_time=100",
        );
        let mut none = Groups::parse(&[]).expect("none");
        let (one, text) = member(&mut none, Some(slow));
        assert_eq!(text.as_deref(), Some(slow));
        assert!(same(&one, &member(&mut none, Some(slow)).0));
        // Another server's group of the same name was another group.
        assert!(!same(&one, &member(&mut none, Some(slower)).0));

        let mut given = Groups::parse(&[slower.to_owned()]).expect("one");
        let (one, text) = member(&mut given, Some(slow));
        assert_eq!(text.as_deref(), Some(slower));
        assert!(same(&one, &member(&mut given, None).0));
    }

    #[test]
    fn follow_keeps_the_members_of_a_group_with_other_limits() {
        let (slow, slower) = (
            "id=slow,ops_size=10,ops_refill_time=100".to_owned(),
            "id=slow,ops_size=5,ops_refill_time=100".to_owned(),
        );
        let other = "id=other,ops_size=1,ops_refill_time=1".to_owned();
        let mut groups = Groups::parse(std::slice::from_ref(&slow)).expect("one");
        let (one, _) = member(&mut groups, None);
        assert_eq!(groups.follow(&[slow]).expect("the same"), []);
        let changed = groups.follow(&[other, slower.clone()]).expect("two");
        let parsed = DiskConfig::parse("path=a,ops_size=5,ops_refill_time=100").expect("a disk");
        assert_eq!(changed, [("slow".to_owned(), parsed.rate_limits)]);
        let (next, text) = member(&mut groups, None);
        assert!(same(&one, &next) && text == Some(slower));
        // One that is gone keeps those who are in it, and takes nobody.
        assert_eq!(groups.follow(&[]).expect("none"), []);
        let mut disk = DiskConfig::parse("path=a,rate_limit_group=slow").expect("a disk");
        assert!(groups.join(&mut disk, None).is_err());
        assert!(groups.follow(&["id=slow".to_owned()]).is_err());
    }

    #[test]
    fn join_names_an_unknown_group() {
        let mut disk = DiskConfig::parse("path=a,rate_limit_group=fast").expect("a disk");
        let mut groups = Groups::parse(&["id=slow,ops_size=1,ops_refill_time=1".to_owned()]).expect("one");
        let failure = groups.join(&mut disk, None).expect_err("no such group");
        let message = format!("{failure:?}");
        assert!(message.contains("fast") && message.contains("slow"), "{message}");
        assert!(Groups::parse(&["id=slow".to_owned()]).is_err());
    }
}
